"""Compiled kernels are kept by what they depend on: a process that comes later compiles none of them again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from preload.engine.kernels.triton import cache

COMPILER = """
import sys
from functools import partial
from pathlib import Path
import torch, triton
from preload.bench.kernel_cases import CASES
from preload.bench.kernel_compile import record
from preload.engine.kernels.triton.cache import use_cache
use_cache(Path(sys.argv[1]), 90)
compiled = []
triton.knobs.compilation.listener = lambda **said: compiled.append(said["cache_hit"])
names = ("RMSNorm, with and without residual", "rotary", "KV write by slot")
for case in CASES:
    if case.name in names:
        for launch in record(partial(case.run, torch.bfloat16)):
            launch.compile(90)
print(len(compiled), compiled.count(False))
"""


def run(root: Path) -> tuple[int, int]:
    """A process that needs some kernels for sm_90: how many it needed, and how many of them it had to compile."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILER, str(root)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    needed, compiled = done.stdout.split()
    return int(needed), int(compiled)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    needed, compiled = run(tmp_path)
    assert needed == compiled > 3
    assert run(tmp_path) == (needed, 0)
    folder = cache.cache_folder(tmp_path, 90)
    assert any(folder.rglob("*.cubin"))


def test_other_sources_and_targets_have_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.cache_folder(tmp_path, 90)
    assert cache.cache_folder(tmp_path, 100) != first
    monkeypatch.setattr(cache, "source_digest", lambda: "0" * 16)
    assert cache.cache_folder(tmp_path, 90) != first


def test_what_nobody_has_used_for_long_is_removed(tmp_path: Path) -> None:
    old, recent = (tmp_path / f"triton-1.0-sm_90-{digit * 16}" for digit in "ab")
    for folder in (old, recent):
        folder.mkdir()
    os.utime(old, (0, 0))
    import triton

    with triton.knobs.cache.scope():
        used = cache.use_cache(tmp_path, 90)
    assert {path.name for path in tmp_path.iterdir()} == {used.name, recent.name}
