"""Which mounts a path leads over, on the mounts that every Linux has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from preload.daemon.mounts import mounts_on_the_way

pytestmark = pytest.mark.skipif(
    not (os.path.ismount("/proc") and os.path.ismount("/dev") and not os.path.ismount("/tmp")),
    reason="/proc and /dev are mounts, /tmp is none",
)


@pytest.mark.parametrize(
    ("path", "mounts"),
    [
        ("/", []),
        ("/nowhere/at/all", ["/"]),
        ("/proc/self/status", ["/proc"]),
        ("/tmp/../proc/.//version", ["/", "/proc"]),
        ("/proc/../../tmp", ["/proc", "/"]),
        ("/dev/fd/0/x", ["/dev", "/proc"]),
    ],
)
def test_a_path_tells_its_mounts_in_order(path: str, mounts: list[str]) -> None:
    assert list(mounts_on_the_way(path))[: len(mounts) or 1] == mounts


def test_links_are_followed_and_those_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    (tmp_path / "relative").symlink_to("../" * len(tmp_path.parts) + "proc/version")
    (tmp_path / "circle").symlink_to("circle")
    assert list(mounts_on_the_way(f"{tmp_path}/proc/self")) == ["/", "/proc"]
    assert list(mounts_on_the_way(f"{tmp_path}/relative")) == ["/", "/proc"]
    assert list(mounts_on_the_way(f"{tmp_path}/circle/x")) == ["/"]


def test_a_mount_is_told_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    real = os.readlink

    def touch(path: str) -> str:
        touched.append(path)
        return real(path)

    monkeypatch.setattr(os, "readlink", touch)
    way = mounts_on_the_way("/proc/version")
    assert next(way) == "/proc"
    assert touched == []
