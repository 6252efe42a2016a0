"""The socket of the probes, without the server behind it: see http.py."""

from __future__ import annotations

import asyncio
import socket

from .cache import WeightCache
from .errors import BadRequestError
from .metrics import Metrics

_BACKLOG = 128


class Probes:
    """Owns the listening socket. Raises BadRequestError if the address is taken: an operator who asked for probes
    must not go without."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise BadRequestError(
                f"cannot listen on {host}:{port}; choose another --http-port ({error.strerror})"
            ) from error
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)

    @property
    def address(self) -> str:
        """host:port it listens on, also when the port was left to the kernel."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def serve(self, cache: WeightCache, metrics: Metrics, stopped: asyncio.Event) -> None:
        """Answers until `stopped`. The server is imported for the first who asks, beside the event loop."""
        if not await self._asked(stopped):
            return
        from importlib import import_module

        http = await asyncio.to_thread(import_module, "preload.daemon.http")
        server = http.HttpServer(http.make_app(cache, metrics))
        serving = asyncio.create_task(server.serve_on(self._socket))
        await stopped.wait()
        server.should_exit = True
        await serving

    async def _asked(self, stopped: asyncio.Event) -> bool:
        """Waits for a first connection. False if `stopped` comes before it."""
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        loop.add_reader(self._socket, asked.set)
        waits = [asyncio.create_task(asked.wait()), asyncio.create_task(stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._socket)
            for task in waits:
                task.cancel()
        return not stopped.is_set()

    def close(self) -> None:
        self._socket.close()
