"""What no document answers: what happens to a GPU's memory when the process that made it is killed.

Each experiment is a few processes, a pattern in memory, a SIGKILL, and what the others read afterwards. On the
emulated driver the answers are what it was written to answer; a real GPU may differ, and that is what this is for.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from .gpu_peers import Peer, said

_PATTERN, _OTHER = 0xA5, 0x5A
_READ_BYTES = 1 << 20
_NOTICES_S = 2.0


def run(device: str, size_bytes: int) -> list[dict[str, str]]:
    """One {"question", "answer"} each."""
    return [*_vmm_without_exporter(device, size_bytes), *_ipc_without_exporter(device, size_bytes)]


def _vmm_without_exporter(device: str, size_bytes: int) -> list[dict[str, str]]:
    """The descriptor is held by this process, which has never mapped it: as the descriptor store does."""
    answers = []
    with Peer(device) as watcher, Peer(device) as exporter:
        free_before = watcher.need("free")["free"]
        created = exporter.need("create", bytes=size_bytes, byte=_PATTERN)
        answers.append(_answer("VMM: may the exporter import its own descriptor", created["reopened"]))
        wanted = exporter.need("read", bytes=_READ_BYTES)["digest"]
        _, (fd,), _, _ = socket.recv_fds(exporter.channel, 16, 1)
        exporter.kill()
        crowded = watcher.ask("crowd", keep=64 << 20, byte=_OTHER)
        with Peer(device) as importer:
            socket.send_fds(importer.channel, [b"fd"], [fd])
            opened = importer.ask("open", bytes=size_bytes)
            found = importer.ask("read", bytes=_READ_BYTES) if "error" not in opened else opened
        kept = "yes, the same bytes" if found.get("digest") == wanted else f"no: {said(found)}"
        pressure = f" (after {crowded.get('taken', 0) >> 20} MiB of others were written)"
        answers.append(_answer("VMM: does memory outlive its exporter while a third process holds the descriptor",
                               kept + pressure))  # fmt: skip
        os.close(fd)
        missing = free_before - watcher.need("free")["free"]
        is_free = "yes" if missing < size_bytes else f"no: {missing >> 20} MiB are missing"
        answers.append(_answer("VMM: is it free once the last descriptor is closed", is_free))
    return answers


def _ipc_without_exporter(device: str, size_bytes: int) -> list[dict[str, str]]:
    answers = []
    with Peer(device) as exporter, Peer(device) as importer, Peer(device) as watcher:
        made = exporter.need("alloc", bytes=size_bytes, byte=_PATTERN)
        answers.append(_answer("IPC: may the exporter open its own handle", made["reopened"]))
        importer.need("import", handle=made["handle"])
        wanted = importer.need("read", bytes=_READ_BYTES)["digest"]
        before = watcher.need("free")["free"]
        exporter.kill()
        after = _read_for(importer, _NOTICES_S)
        answers.append(_answer("IPC: what an importer reads after the exporter's death",
                               "the same bytes" if after.get("digest") == wanted else said(after)))  # fmt: skip
        given_back = watcher.need("free")["free"] - before
        answers.append(_answer("IPC: is the memory given back although it is imported",
                               "yes" if given_back >= size_bytes else "no"))  # fmt: skip
        taken = watcher.ask("crowd", keep=64 << 20, byte=_OTHER).get("taken", 0)
        pressed = importer.ask("read", bytes=_READ_BYTES)
        text = "the same bytes" if pressed.get("digest") == wanted else said(pressed)
        answers.append(_answer("IPC: what it reads once others have used all memory",
                               f"{text} (after {taken >> 20} MiB were written)"))  # fmt: skip
    return answers


def _read_for(importer: Peer, seconds: float) -> dict[str, Any]:
    """Its last answer: a driver may take a moment to notice a death."""
    end_s = time.monotonic() + seconds
    while True:
        found = importer.ask("read", bytes=_READ_BYTES)
        if time.monotonic() > end_s or "digest" not in found:
            return found


def _answer(question: str, answer: Any) -> dict[str, str]:
    return {"question": question, "answer": str(answer)}
