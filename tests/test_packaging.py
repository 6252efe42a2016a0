"""What editable installs hide: a package that is not listed works here and vanishes from the wheel."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DISTRIBUTED = ("bench", "cli", "daemon", "engine", "protos", "systemd")


def folders() -> set[str]:
    found = (init.parent.relative_to(ROOT) for top in DISTRIBUTED for init in (ROOT / top).rglob("__init__.py"))
    return {"preload." + ".".join(path.parts) for path in found}


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == folders()


def test_wheel_holds_every_module_and_contract(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in DISTRIBUTED:
        for source in (ROOT / top).rglob("*.py"):
            assert f"preload/{source.relative_to(ROOT)}" in names
    assert "preload/protos/weight_cache.proto" in names
    kernels = Path("engine/kernels/native")
    sources = [path for path in (ROOT / kernels).iterdir() if path.suffix in (".cpp", ".h")]
    assert sources
    assert {f"preload/{kernels / path.name}" for path in sources} <= names


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("preload.cli.main", ("torch", "numpy", "grpc", "starlette")),
        ("preload.daemon.server", ("torch", "numpy", "preload.engine")),
        ("preload.engine.frontend.web_server", ("torch", "numpy")),
        ("preload.engine.client", ("torch", "numpy")),
    ],
)
def test_module_imports_nothing_heavy(module: str, banned: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {banned!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
