"""Calls to a core whose channel is closed by others: an error of the call, never a cancellation of the caller."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from preload.engine.frontend.core_client import CoreCallError, CoreSession

Call = Callable[[CoreSession], Awaitable[object]]
CALLS: dict[str, Call] = {
    "stats": lambda session: session.stats(None),
    "promote": lambda session: session.promote(60),
    "drain": lambda session: session.drain(60),
}


@pytest.fixture
def silent_core(tmp_path: Path) -> Iterator[str]:
    """A socket that takes connections and never says a word."""
    path = str(tmp_path / "core.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        yield path


async def started(session: CoreSession, call: Call) -> asyncio.Task[object]:
    task = asyncio.ensure_future(call(session))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("name", CALLS)
def test_a_channel_closed_under_a_call_is_an_error_of_the_call(silent_core: str, name: str) -> None:
    async def main() -> None:
        session = CoreSession(silent_core)
        task = await started(session, CALLS[name])
        await session.close()
        with pytest.raises(CoreCallError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_closed_channel_is_an_error_of_the_call(silent_core: str, name: str) -> None:
    async def main() -> None:
        session = CoreSession(silent_core)
        await session.close()
        with pytest.raises(CoreCallError):
            await CALLS[name](session)

    asyncio.run(main())


@pytest.mark.parametrize("name", CALLS)
def test_a_caller_that_is_cancelled_is_cancelled(silent_core: str, name: str) -> None:
    async def main() -> None:
        session = CoreSession(silent_core)
        task = await started(session, CALLS[name])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await session.close()

    asyncio.run(main())
