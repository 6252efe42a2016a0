"""What a connection leaves behind in the server's event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
import weakref
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from preload.engine.frontend.client_guard import make_protocol

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("resets", [False, True])
def test_a_connection_is_forgotten_as_soon_as_it_is_closed(resets: bool) -> None:
    async def main() -> None:
        config = uvicorn.Config(app, http=make_protocol(60.0), timeout_keep_alive=60, log_level="error")
        config.load()
        made: list[weakref.ref[asyncio.Protocol]] = []

        def make() -> asyncio.Protocol:
            protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=ServerState(), app_state={}
            )
            made.append(weakref.ref(protocol))
            return protocol

        loop = asyncio.get_running_loop()
        server = await loop.create_server(make, "127.0.0.1", 0)
        client = socket.create_connection(server.sockets[0].getsockname())
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.setblocking(False)
        await loop.sock_sendall(client, REQUEST)
        assert (await loop.sock_recv(client, 1000)).endswith(b"ok")
        client.close()
        async with asyncio.timeout(10):
            while made[0]() is not None:
                await asyncio.sleep(0.01)
        server.close()

    asyncio.run(main())
