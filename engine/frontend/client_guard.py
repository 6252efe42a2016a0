"""Slow and silent clients: what one of them holds is bounded in bytes and in time.

A connection brings a whole request head within the deadline, counted from its opening or from the first byte after
the last answer (bodies have their own deadline where they are read). An answer is buffered up to uvicorn's high-water
mark; then the sender waits, and a client that has not read on by the deadline is cut off. Nobody else waits for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .http import ClientGoneError

_TRANSPORT = "preload.transport"


def make_protocol(timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a deadline on request heads, and the transport in each request's state."""

    class GuardedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, _TRANSPORT: transport}
            self._head_timer = self.loop.call_later(timeout_s, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self._head_timer is None and not self._answering:
                self._head_timer = self.loop.call_later(timeout_s, self.transport.abort)
            super().data_received(data)
            if self._answering:
                self._stop_head_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._stop_head_timer()  # a head that was answered while it was read; the next has its own time

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            super().connection_lost(exc)
            # uvicorn leaves it running when the client has reset the connection, and with it all of this object.
            if self.timeout_keep_alive_task is not None:
                self.timeout_keep_alive_task.cancel()

        def send_400_response(self, msg: str) -> None:
            """Also when the nonsense is in the body of a request that is being answered: that answer is given up."""
            if not self._answering:
                super().send_400_response(msg)
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.transport.abort()

        @property
        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return GuardedProtocol


async def send_in_time(scope: Scope, send: Send, message: Message, timeout_s: float) -> None:
    """Sends, or cuts the connection off and raises ClientGoneError when the client does not read."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError as error:
        transport: Any = scope.get("state", {}).get(_TRANSPORT)
        if transport is not None:
            transport.abort()
        raise ClientGoneError from error
