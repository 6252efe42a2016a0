"""The service that chaos is let loose on: a kept daemon, and a frontend whose listening socket somebody else holds.

The bench plays the service manager: it owns the socket, hands it to every frontend it starts, and restarts one by
starting the next and telling the old one to stop. Connections wait in the socket meanwhile.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from preload.engine.client import Control
from preload.engine.errors import PreloadError
from preload.engine.template.fingerprint import place_of

from .processes import BenchError, preload_command, wait_until

_EXEC = """
import os, sys
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="http")
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""LISTEN_PID must be the pid of the process that takes the socket, which only that process knows."""


class ChaosService:
    """Keeper, daemon, template and frontend in one private folder."""

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self.folder = folder
        self.runtime_dir = str(folder / "run")
        self._checkpoint = checkpoint
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._log = (folder / "chaos.log").open("ab")
        self._frontends: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ChaosService:
        os.mkdir(self.runtime_dir, 0o700)
        self._keeper = self._spawn("keeper", "--runtime-dir", self.runtime_dir, "--", "--http-port", "0")
        try:
            wait_until(self.daemon_pid, "the daemon to answer")
            self._start_frontend()
            wait_until(self._is_ready, "the server to be ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in (*self._frontends, self._keeper):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._listener.close()
        self._log.close()
        template = self.template_pid()
        if template is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(template, signal.SIGTERM)

    @property
    def log(self) -> str:
        return (self.folder / "chaos.log").read_text(errors="replace")

    def daemon_pid(self) -> int | None:
        """The daemon that answers now, if one does."""
        try:
            with Control(self.runtime_dir) as control:
                return int(control.list().pid)
        except PreloadError:
            return None

    def daemon_bytes(self) -> int:
        """Bytes of weights on the daemon's books."""
        with Control(self.runtime_dir) as control:
            device = control.list().devices[0]
            return int(device.resident_bytes + device.reserved_bytes)

    def core_pid(self, state: str) -> int | None:
        """A core in this state: "serving" or "standby"."""
        for life in reversed(self._cores()):
            if life["state"] == state and life["died_at_ns"] is None:
                return int(life["pid"])
        return None

    def template_pid(self) -> int | None:
        """The process that forks cores, by its lock: the cores it forked have its command line."""
        try:
            return int(place_of(self.runtime_dir).lock.read_text())
        except (OSError, ValueError):
            return None

    def loader_pids(self) -> list[int]:
        """Loaders of any daemon; the bench has only one."""
        daemon = self.daemon_pid()
        return [pid for pid in _find(b"preload.engine.loading.loader") if _parent(pid) == daemon]

    def restart_frontend(self) -> None:
        """A new frontend on the same socket; the old one finishes what it has and ends."""
        old = self._frontends[-1]
        self._start_frontend()
        old.send_signal(signal.SIGTERM)

    def reap_frontends(self) -> int:
        """Forgets those that ended; returns how many ended otherwise than well."""
        ended = [process for process in self._frontends[:-1] if process.poll() is not None]
        self._frontends = [process for process in self._frontends if process not in ended]
        return sum(process.returncode != 0 for process in ended)

    def _start_frontend(self) -> None:
        fd = self._listener.fileno()
        words = ("serve", self._checkpoint, "--runtime-dir", self.runtime_dir, "--standby", "1")
        command = [sys.executable, "-P", "-c", _EXEC, str(fd), *preload_command(*words)]
        process = subprocess.Popen(
            command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._frontends.append(process)

    def _spawn(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(preload_command(*words), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def _is_ready(self) -> bool:
        if self._frontends[-1].poll() is not None:
            raise BenchError(f"the frontend ended: {self.log[-2000:]}")
        try:
            return self._get("/ready")[0] == 200
        except OSError:
            return False

    def _cores(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self._get("/debug/cores")[1]["cores"]
        except (OSError, http.client.HTTPException, ValueError):
            return []
        return found

    def _get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def _find(*words: bytes) -> list[int]:
    """Processes whose command line has all of these among its words."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if all(any(word == part or word in part for part in command) for word in words):
                found.append(int(pid))
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
