"""Cores from a template that cannot be asked, or whose forks do not live: the frontend starts processes instead."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from preload.engine.frontend import core_launch
from preload.engine.frontend.core_launch import TemplatedCommand
from preload.engine.frontend.core_process import CoreProcess
from preload.engine.frontend.core_records import CoreRecords
from preload.engine.frontend.errors import StartError
from preload.engine.frontend.managed_core import ManagedCore
from preload.engine.template import client
from preload.engine.template.client import NoForkError, fork_core
from preload.engine.template.fingerprint import Place, place_of
from preload.engine.template.wire import receive_packet
from preload.protos import template_pb2 as pb

READY_S = 60.0


class StillbornTemplate:
    """Answers every request with a process that ends at once."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.num_forks = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(place.socket)
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                _, fds = receive_packet(connection)
                self.num_forks += 1
                with subprocess.Popen([sys.executable, "-c", ""]) as process:
                    pidfd = os.pidfd_open(process.pid)
                    answer = pb.Answer(forked=pb.Forked(pid=process.pid))
                    socket.send_fds(connection, [answer.SerializeToString()], [pidfd])
                    for fd in (pidfd, *fds):
                        os.close(fd)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def template(tmp_path: Path) -> Iterator[StillbornTemplate]:
    made = StillbornTemplate(place_of(str(tmp_path)))
    yield made
    made.close()


def sleeper(place: Place) -> TemplatedCommand:
    """A core that never listens."""
    words = [sys.executable, "-c", "import time; time.sleep(600)", "preload.engine.core"]
    return TemplatedCommand(lambda socket_path, spawned_at_ns: words, place)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_fork_that_dies_before_it_is_ready_is_followed_by_a_process(
    template: StillbornTemplate, tmp_path: Path
) -> None:
    async def run() -> list[bool]:
        records = CoreRecords(str(tmp_path), CoreProcess(0, str(tmp_path)))
        forked = []
        for _ in range(3):
            core = await ManagedCore.start(records, sleeper(template.place))
            forked.append(core.life.is_forked)
            with pytest.raises(StartError):
                await core.open(READY_S if core.life.is_forked else 0.1)
            await core.bury()
        return forked

    assert asyncio.run(run()) == [True, False, True]
    assert template.num_forks == 2


@pytest.mark.parametrize("trouble", ["pipe", "socket", "fingerprint"])
def test_whatever_the_system_refuses_is_no_fork_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    place = place_of(str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    async def run() -> tuple[set[str], set[str]]:
        before = descriptors()
        with monkeypatch.context() as patch:
            if trouble == "fingerprint":
                patch.setattr(client, "fingerprint", refuse)
            elif trouble == "socket":
                patch.setattr(client.socket, "socket", refuse)
            else:
                patch.setattr(client.os, "pipe2", _second_refuses(os.pipe2, refuse))
            with pytest.raises(NoForkError):
                await fork_core(place, ["--config-json", "{}"])
        return before, descriptors()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place.socket)
        listener.listen()
        before, after = asyncio.run(run())
    assert after <= before


def _second_refuses(function: Callable[..., object], refuse: Callable[..., None]) -> Callable[..., object]:
    calls: list[int] = []

    def call(*arguments: object) -> object:
        calls.append(1)
        return function(*arguments) if len(calls) == 1 else refuse()

    return call


def test_a_fork_whose_output_cannot_be_read_is_ended_and_a_process_started(
    template: StillbornTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        connect = loop.connect_read_pipe
        monkeypatch.setattr(loop, "connect_read_pipe", refuse)
        arguments = sleeper(template.place)("", 0)
        assert await core_launch.start_forked(arguments, template.place) is None
        monkeypatch.setattr(loop, "connect_read_pipe", connect)
        return template.num_forks == 1

    assert asyncio.run(run())


def test_a_command_whose_folder_is_gone_is_a_start_that_failed(tmp_path: Path) -> None:
    def command(socket_path: str, spawned_at_ns: int) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory")

    async def run() -> None:
        records = CoreRecords(str(tmp_path), CoreProcess(0, str(tmp_path)))
        with pytest.raises(StartError, match="no command line"):
            await ManagedCore.start(records, command)
        assert records.lives[-1].state == "dead"

    asyncio.run(run())
