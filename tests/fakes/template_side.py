"""Fixtures for the template process: a real one in a folder of its own, and raw packets to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from preload.engine.template.fingerprint import Place, fingerprint, place_of
from preload.engine.template.wire import receive_packet
from preload.protos import template_pb2 as pb

TIMEOUT_S = 120


@dataclass
class TemplateUnderTest:
    """A template process. `words` are added to its command line."""

    runtime_dir: Path
    wait_for: Callable[..., Any]
    command: list[str] = field(default_factory=lambda: [sys.executable, "-P", "-m", "preload.cli.main", "template"])
    environment: dict[str, str] | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def place(self) -> Place:
        return place_of(str(self.runtime_dir))

    @property
    def log(self) -> str:
        return (self.runtime_dir.parent / "template.log").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> TemplateUnderTest:
        with (self.runtime_dir.parent / "template.log").open("ab") as log:
            command = [*self.command, "--runtime-dir", str(self.runtime_dir)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        self.wait_for(self._listens, "the template to listen", 180)
        return self

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with contextlib.suppress(OSError), self.connect():
            return True
        return False

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(self.place.socket)
        except OSError:
            sock.close()
            raise
        return sock

    def send(self, data: bytes, fds: list[int] | None = None) -> pb.Answer | None:
        """The answer to one packet; None if the template hangs up."""
        with self.connect() as sock:
            socket.send_fds(sock, [data], fds or [])
            return receive_answer(sock)

    def request(self, *arguments: str, **changes: Any) -> pb.ForkRequest:
        fields = {"fingerprint": fingerprint(), "arguments": arguments, "working_directory": b"/", **changes}
        return pb.ForkRequest(**fields)

    def fork(self, *arguments: str, **changes: Any) -> RawFork:
        return RawFork(self.connect(), self.request(*arguments, **changes))

    def end(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


def receive_answer(sock: socket.socket) -> pb.Answer | None:
    data, fds = receive_packet(sock)
    for fd in fds:
        os.close(fd)
    return pb.Answer.FromString(data) if data else None


class RawFork:
    """One exchange with the template, packet by packet, as a frontend has it."""

    def __init__(self, sock: socket.socket, request: pb.ForkRequest) -> None:
        self.sock = sock
        output, output_write = os.pipe()
        liveness_read, self.life_line = os.pipe()
        self.output = os.fdopen(output, "rb")
        socket.send_fds(sock, [request.SerializeToString()], [output_write, liveness_read])
        os.close(output_write)
        os.close(liveness_read)
        answer = receive_answer(sock)
        assert answer is not None
        self.answer = answer
        self.pid = answer.forked.pid

    def exit_code(self) -> int | None:
        answer = receive_answer(self.sock)
        return answer.exited.exit_code if answer is not None else None

    def words(self) -> str:
        return self.output.read().decode()

    def close(self) -> None:
        self.sock.close()
        self.output.close()
        with contextlib.suppress(OSError):
            os.close(self.life_line)


@pytest.fixture(scope="session")
def new_template(
    tmp_path_factory: pytest.TempPathFactory, wait_for_session: Callable[..., Any]
) -> Iterator[Callable[..., TemplateUnderTest]]:
    """Makes templates that are not started; what still runs at the end of the session is ended."""
    made: list[TemplateUnderTest] = []

    def make(runtime_dir: Path | None = None, **fields: Any) -> TemplateUnderTest:
        folder = runtime_dir or tmp_path_factory.mktemp("template") / "run"
        folder.mkdir(mode=0o700, exist_ok=True)
        made.append(TemplateUnderTest(folder, wait_for_session, **fields))
        return made[-1]

    yield make
    for template in made:
        if template.process is not None:
            template.end()


@pytest.fixture(scope="session")
def template(new_template: Callable[..., TemplateUnderTest]) -> TemplateUnderTest:
    """One template for all tests that do it no harm."""
    return new_template().start()


@pytest.fixture
def start_template(new_template: Callable[..., TemplateUnderTest]) -> Iterator[Callable[..., TemplateUnderTest]]:
    """Templates of a test's own."""
    started: list[TemplateUnderTest] = []

    def start(*args: Any, **fields: Any) -> TemplateUnderTest:
        started.append(new_template(*args, **fields).start())
        return started[-1]

    yield start
    for template in started:
        template.end()
