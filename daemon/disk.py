"""Looks at clients' paths without trusting that they answer.

A path may lie on a mount that hangs. Every look happens in a thread of its own, with a deadline, and nobody waits for
such a thread at the end of the process. A path that has not answered is not asked again until it has; and a thread
that is about to touch a mount on which several hang already gives up before. So a hung mount costs a few threads, no
turn of the event loop, and nothing to those whose paths lie elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from . import receipts
from .errors import CheckpointNotFoundError, TooManyError
from .generations import Receipt
from .mounts import mounts_on_the_way

T = TypeVar("T")

_DEADLINE_S = 10.0
_MAX_LOOKS = 128
"""Threads that have not passed their deadline; who comes then waits for one of them, up to a deadline of its own."""
_MAX_SILENT_PER_MOUNT = 4


@dataclass(eq=False)
class _Look:
    """One thread's. `mount` is where it is now."""

    path: str
    began_s: float = field(default_factory=time.monotonic)
    mount: str = ""

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.began_s > _DEADLINE_S


class _MountIsSilentError(Exception):
    pass


class Disk:
    """Owns the threads that look."""

    def __init__(self) -> None:
        self._looks: set[_Look] = set()
        self._room = asyncio.Semaphore(_MAX_LOOKS)

    async def require_path(self, path: str) -> None:
        """Raises CheckpointNotFoundError, with the system's reason, unless the path can be looked at."""
        await self._look(path, lambda: receipts.require_path(path))

    async def stale(self, path: str, proof: Sequence[Receipt]) -> list[str]:
        """The files behind `path` that are not what the receipts say. Raises CheckpointNotFoundError."""
        return await self._look(path, lambda: receipts.stale(proof))

    async def _look(self, path: str, look: Callable[[], T]) -> T:
        if any(other.path == path and other.is_silent for other in self._looks):
            raise _silent(path)
        has_begun = False
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._room.acquire()
                has_begun = True
                return await self._begin(_Look(path), look)
        except _MountIsSilentError as error:
            raise _silent(path) from error
        except TimeoutError as error:
            if not has_begun:
                raise TooManyError(f"{_MAX_LOOKS} looks at other paths are under way; try again") from error
            raise _silent(path) from error

    def _begin(self, own: _Look, look: Callable[[], T]) -> asyncio.Future[T]:
        """Starts the look. It holds its place until it has ended or passed its deadline, whoever waits for it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        leave = _once(self._room.release)
        timer = loop.call_later(_DEADLINE_S, leave)

        def end(result: T | None, error: BaseException | None) -> None:
            self._looks.discard(own)
            timer.cancel()
            leave()
            if answer.done():
                return
            answer.set_exception(error) if error is not None else answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, failure = None, None
            try:
                self._walk(own)
                result = look()
            except BaseException as error:  # noqa: BLE001 - whoever asked is told
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile, and with it who asked
                loop.call_soon_threadsafe(end, result, failure)

        self._looks.add(own)
        try:
            threading.Thread(target=run, name="preload-disk", daemon=True).start()
        except RuntimeError as error:
            end(None, TooManyError(f"no thread is left to look at {own.path}: {error}"))
        return answer

    def _walk(self, own: _Look) -> None:
        """In the thread: notes each mount before it is touched. Raises _MountIsSilentError.

        What `look` follows further within a folder, to files elsewhere, counts for the folder's mount."""
        for mount in mounts_on_the_way(own.path):
            others = [other for other in self._looks.copy() if other.mount == mount and other.is_silent]
            if len(others) >= _MAX_SILENT_PER_MOUNT:
                raise _MountIsSilentError
            own.mount = mount


def _once(action: Callable[[], None]) -> Callable[[], None]:
    left = [action]
    return lambda: left.pop()() if left else None


def _silent(path: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"checkpoint {path}: its file system has not answered for {_DEADLINE_S:.0f} s; is its mount alive?",
        {"path": path},
    )
