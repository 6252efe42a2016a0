"""Lets go of segments in a thread: freeing memory takes the kernel 60 ms a GiB, and a holder as long as it takes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_closer = ThreadPoolExecutor(1, thread_name_prefix="preload-free")


def close_later(fd: int) -> None:
    _closer.submit(os.close, fd)


def free_later(free: Callable[[], None]) -> None:
    """`free` raises nothing."""
    _closer.submit(free)


async def all_closed() -> None:
    """Returns when every segment closed so far has been let go of."""
    await asyncio.wrap_future(_closer.submit(lambda: None))
