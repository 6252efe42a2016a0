"""The folder that somebody happens to be in is no place to import from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
POISON = "import pathlib\npathlib.Path({marker!r}).write_text(__name__)\nraise SystemExit(99)\n"


def test_a_daemon_and_its_loaders_import_nothing_from_their_working_folder(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, marker = tmp_path / "poisoned", tmp_path / "executed"
    folder.mkdir()
    for name in ("argparse", "blake3", "google", "grpc", "preload", "socket"):
        (folder / f"{name}.py").write_text(POISON.format(marker=str(marker)))
    monkeypatch.chdir(folder)
    daemon = make_daemon()
    assert daemon.load(raw_checkpoint, model="raw").id
    assert not marker.exists(), f"{marker.read_text()} of the working folder was executed"


def test_every_child_is_started_with_a_safe_path() -> None:
    found = []
    for path in [p for part in ("bench", "cli", "daemon", "engine") for p in (ROOT / part).rglob("*.py")]:
        text = path.read_text()
        modules = re.findall(r'(\S+)\s+"-m",\s*"preload', text)
        found += [(path.relative_to(ROOT), before) for before in modules]
    assert len(found) >= 6
    assert [place for place in found if not place[1].endswith('"-P",')] == []
