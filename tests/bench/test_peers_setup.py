"""What is compared with gets an environment of its own."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

from preload.bench.peers.setup import make_environment


def make_wheel(folder: Path, name: str) -> str:
    """A package of one empty module, as pip installs it. Returns the wheel's path."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return str(path)


def test_an_environment_lacks_what_it_is_to_be_without(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path, name) for name in ("wanted", "unwanted")]
    python = make_environment(tmp_path / "env", wheels, without=["unwanted"])

    def imports(name: str) -> bool:
        return subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0

    assert imports("wanted")
    assert not imports("unwanted")
