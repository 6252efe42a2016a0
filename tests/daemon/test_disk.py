"""A path whose file system does not answer, without one: the look itself is held up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from preload.daemon import disk, receipts
from preload.daemon.disk import Disk
from preload.daemon.errors import CheckpointNotFoundError


def test_a_path_that_hangs_is_refused_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    looks = []

    def hang(path: str) -> None:
        looks.append(path)
        answers.wait(60)

    monkeypatch.setattr(receipts, "require_path", hang)
    monkeypatch.setattr(disk, "_DEADLINE_S", 0.05)

    async def look_twice() -> None:
        looker = Disk()
        for _ in range(2):
            with pytest.raises(CheckpointNotFoundError, match=r"/hung.*has not answered"):
                await looker.require_path("/hung")
        assert looks == ["/hung"]
        answers.set()
        monkeypatch.undo()
        await looker.require_path("/")

    asyncio.run(look_twice())
