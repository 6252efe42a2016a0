"""GPU kernels on a machine without a GPU: in Triton's interpreter, which a process has from its start or not at all.

So each file of interpreted/ runs in a process of its own; its tests are ordinary ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")

pytest.importorskip("triton")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("check_*.py")))
def test_kernels_in_the_interpreter(name: str) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / f"{name}.py")]
    done = subprocess.run(
        [sys.executable, "-P", *words], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
