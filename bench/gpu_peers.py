"""The other side of gpu_peer.py: starts such processes, asks them, and kills them."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from typing import Any

from .processes import BenchError


class Peer:
    """One process with memory of a GPU; gone when its `with` block ends."""

    def __init__(self, device: str) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "preload.bench.gpu_peer", device, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def ask(self, word: str, **values: Any) -> dict[str, Any]:
        """Its answer; {"died": signal} if it did not survive the question."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its end is what the answer will tell
            self.process.stdin.write(json.dumps({"do": word, **values}) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            return {"died": signal.Signals(-code).name if code < 0 else f"exit code {code}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def need(self, word: str, **values: Any) -> dict[str, Any]:
        """An answer without an error. Raises BenchError."""
        answer = self.ask(word, **values)
        if "error" in answer or "died" in answer:
            raise BenchError(f"{word}: {answer.get('error') or 'the process died of ' + answer['died']}")
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.channel):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def said(answer: dict[str, Any]) -> str:
    """An answer to "read" or "write" in a few words."""
    if "died" in answer:
        return f"process died of {answer['died']}"
    return str(answer.get("error") or answer.get("digest") or "done")
