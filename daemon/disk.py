"""Looks at clients' paths without trusting that they answer.

A path may lie on a mount that hangs. Every look happens in a thread of its own pool, with a deadline; a path that has
not answered is not asked again until it has, so that a hung mount costs one thread for each of its paths and no turn
of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from . import receipts
from .errors import CheckpointNotFoundError
from .generations import Receipt

T = TypeVar("T")

_DEADLINE_S = 10.0
_NUM_THREADS = 16


class Disk:
    """Owns the threads that look."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="preload-disk")
        self._looks: dict[str, Future[object]] = {}

    async def require_path(self, path: str) -> None:
        """Raises CheckpointNotFoundError, with the system's reason, unless the path can be looked at."""
        await self._look(path, lambda: receipts.require_path(path))

    async def stale(self, path: str, proof: Sequence[Receipt]) -> list[str]:
        """The files behind `path` that are not what the receipts say. Raises CheckpointNotFoundError."""
        return await self._look(path, lambda: receipts.stale(proof))

    async def _look(self, path: str, look: Callable[[], T]) -> T:
        pending = self._looks.get(path)
        if pending is not None and not pending.done():
            raise self._silent(path)
        future = self._pool.submit(look)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), _DEADLINE_S)
        except TimeoutError as error:
            self._looks = {p: f for p, f in self._looks.items() if not f.done()}
            self._looks[path] = future  # type: ignore[assignment]
            raise self._silent(path) from error

    @staticmethod
    def _silent(path: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"checkpoint {path}: its file system has not answered for {_DEADLINE_S:.0f} s; is its mount alive?",
            {"path": path},
        )
