"""The operator's door: a Unix socket in the frontend's private folder, for `preload rollout`, and SIGHUP.

One exchange per connection: a line of JSON of at most 64 KiB in, lines of JSON out.
  {"do": "status"}   → {"pid", "model", "url", "serving", "generation"}
  {"do": "update", "to", "set", "evict_first", "drain_s"} → a line per step, the last with "done" or "error"
An update goes on when whoever asked for it hangs up. The socket has mode 0600 in a folder of mode 0700, and only the
frontend's own user, or root, is listened to.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from preload.engine.errors import CoreError, PreloadError, RequestError

from .errors import StartError
from .rollout import Report, Rollout
from .service import Service
from .update import Update

SOCKET_NAME = "admin.sock"
_MAX_LINE_BYTES = 64 * 1024
_REQUEST_S = 10.0


@asynccontextmanager
async def admin_socket(service: Service, url: str) -> AsyncIterator[None]:
    """Listens as long as its body runs. Raises StartError."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # An operator who hangs up, or sends nonsense for longer than we listen, is told nothing.
            with suppress(ConnectionError, TimeoutError):
                await _answer(service, url, reader, writer)
        finally:
            writer.close()

    path = os.path.join(service.socket_dir, SOCKET_NAME)
    umask = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(answer, path, limit=_MAX_LINE_BYTES)
    except OSError as error:
        raise StartError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(umask)
    try:
        yield
    finally:
        server.close()


async def _answer(service: Service, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        _check_peer(writer.get_extra_info("socket"))
        asked = await asyncio.wait_for(_read_request(reader), _REQUEST_S)
        if asked.get("do") == "status":
            await _send(writer, _status(service, url))
        elif asked.get("do") == "update":
            await _update(service, Update.from_json(asked), writer)
        else:
            raise RequestError('\'do\' is "status" or "update"')
    except RequestError as error:
        await _send(writer, _failure(error))


def _check_peer(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (0, os.geteuid()):
        raise RequestError(f"user {uid} may not administrate this service")


async def _read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        value = json.loads(await reader.readuntil(b"\n"))
    except (ValueError, RecursionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise RequestError(f"a request is one line of JSON of at most {_MAX_LINE_BYTES} bytes") from error
    if not isinstance(value, dict):
        raise RequestError("a request is a JSON object")
    return value


async def _send(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    writer.write(json.dumps(value).encode() + b"\n")
    await asyncio.wait_for(writer.drain(), _REQUEST_S)


def _status(service: Service, url: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "model": service.config.model_name,
        "url": url,
        "serving": service.supervisor.serving,
        "generation": service.current.config.generation,
    }


async def _update(service: Service, update: Update, writer: asyncio.StreamWriter) -> None:
    steps: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    service.start_update(run_update(service, update, steps.put_nowait))
    while True:
        step = await steps.get()
        await _send(writer, step)
        if "error" in step or step["step"] == "done":
            return


async def run_update(service: Service, update: Update, report: Report) -> None:
    """An update whose failure is its last report."""
    try:
        await Rollout(service, update, report).run()
    except PreloadError as error:
        report(_failure(error))
    except BaseException as error:
        report(_failure(CoreError(f"the update was given up: {error!r}")))
        raise


def _failure(error: PreloadError) -> dict[str, Any]:
    return {"step": "failed", "error": error.message, "reason": int(error.reason), "kind": type(error).__name__}


def restart_core(service: Service) -> None:
    """SIGHUP: the same flags and weights, another core."""

    def report(step: dict[str, Any]) -> None:
        print(f"preload serve: update: {step.get('error') or step['message']}", file=sys.stderr, flush=True)

    service.start_update(run_update(service, Update(), report))
