"""The template process over its real socket: what it guards, what it refuses, and what it never dies of."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.template.client import NoForkError, fork_core
from preload.engine.template.wire import MAX_PACKET_BYTES
from preload.protos import template_pb2 as pb

TIMEOUT_S = 120
NO_DAEMON = ("--config-json", '{"runtime_dir": "/nonexistent", "checkpoint": "/m.gguf"}')
"""A core that ends with 3 as soon as it asks for its weights."""


def config_of(runtime_dir: Path) -> str:
    return json.dumps({"runtime_dir": str(runtime_dir), "checkpoint": "/m.gguf"})


def assert_serves(template: Any) -> None:
    fork = template.fork(*NO_DAEMON)
    assert fork.exit_code() == 3
    fork.close()


def test_a_template_has_one_thread_and_a_socket_of_its_owner_only(template: Any) -> None:
    assert os.listdir(f"/proc/{template.pid}/task") == [str(template.pid)]
    assert os.stat(template.place.socket).st_mode & 0o777 == 0o600
    assert int(template.place.lock.read_text()) == template.pid


def test_a_fork_speaks_through_the_pipe_and_its_exit_status_is_told(template: Any) -> None:
    fork = template.fork(*NO_DAEMON)
    assert fork.pid > 0
    assert fork.exit_code() == 3
    assert "no daemon serves in /nonexistent" in fork.words()
    fork.close()
    wrong = template.fork("--config-json", '{"bogus": 1}')
    assert wrong.exit_code() == 2
    assert "bogus" in wrong.words()
    wrong.close()


def test_a_fork_takes_over_environment_and_folder_of_whoever_asked(
    template: Any, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "daemon.sock"))
    listener.listen()  # never accepts: the core waits for its daemon, and can be looked at
    config = config_of(tmp_path)
    environment = [b"COLOUR=blue", b"EMPTY="]
    fork = template.fork("--config-json", config, environment=environment, working_directory=os.fsencode(tmp_path))
    wait_for(lambda: os.readlink(f"/proc/{fork.pid}/cwd") == str(tmp_path), "the fork to change its folder")
    wait_for(lambda: Path(f"/proc/{fork.pid}/comm").read_text() == "preload-core\n", "the fork to take its name")
    assert os.getsid(fork.pid) == fork.pid

    def status() -> dict[str, str]:
        return dict(line.split(":\t", 1) for line in Path(f"/proc/{fork.pid}/status").read_text().splitlines())

    wait_for(lambda: int(status()["SigBlk"], 16) == 0, "the fork to unblock its signals")
    assert int(status()["SigCgt"], 16) & 1 << (signal.SIGTERM - 1) == 0
    os.kill(fork.pid, signal.SIGTERM)
    assert fork.exit_code() == -signal.SIGTERM
    fork.close()
    listener.close()


def test_garbage_and_excess_are_refused_and_never_stop_it(template: Any) -> None:
    reasons = {
        b"\xff" * 100: pb.Refused.BAD_REQUEST,
        template.request(*NO_DAEMON).SerializeToString()[:-3]: pb.Refused.BAD_REQUEST,
        template.request(*NO_DAEMON).SerializeToString(): pb.Refused.BAD_REQUEST,  # without its descriptors
        b"\n" * (MAX_PACKET_BYTES + 1): pb.Refused.BAD_REQUEST,
    }
    for data, reason in reasons.items():
        answer = template.send(data)
        assert answer is not None
        assert answer.refused.reason == reason
        assert answer.refused.message
    fds = os.pipe()
    for count in (1, 3, 8, 40):
        answer = template.send(template.request(*NO_DAEMON).SerializeToString(), [fds[0]] * count)
        assert answer is not None
        assert answer.refused.reason == pb.Refused.BAD_REQUEST
    for fd in fds:
        os.close(fd)
    generator = random.Random(5)
    for _ in range(200):
        with template.connect() as sock:
            sock.send(generator.randbytes(generator.randrange(1, 600)))
    assert_serves(template)


def test_no_descriptor_stays_behind(template: Any, wait_for: Callable[..., Any]) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{template.pid}/fd"))

    assert_serves(template)
    # Connections of other tests may still be on their way out.
    wait_for(lambda: not [x for x in _fds(template.pid) if x == "anon_inode:[pidfd]"], "the template to be idle")
    before = count()
    fds = os.pipe()
    for _ in range(20):
        template.send(b"junk", list(fds))
        assert_serves(template)
    for fd in fds:
        os.close(fd)
    wait_for(lambda: count() <= before, "the template to close what it was sent")


def _fds(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def test_silent_and_vanishing_peers_hold_up_nobody(template: Any) -> None:
    silent = [template.connect() for _ in range(50)]
    with template.connect() as gone:
        gone.send(b"x")
    assert_serves(template)
    for sock in silent:
        assert sock.recv(1) == b""  # hung up on when their time is over
        sock.close()


def test_many_forks_at_once_each_get_their_own_end(template: Any) -> None:
    forks = [template.fork(*NO_DAEMON) for _ in range(24)]
    assert len({fork.pid for fork in forks}) == 24
    assert [fork.exit_code() for fork in forks] == [3] * 24
    for fork in forks:
        fork.close()


def test_a_fork_whose_life_line_is_cut_already_ends_at_once(template: Any) -> None:
    liveness, life_line = os.pipe()
    output, output_write = os.pipe()
    os.close(life_line)
    with template.connect() as sock:
        socket.send_fds(sock, [template.request(*NO_DAEMON).SerializeToString()], [output_write, liveness])
        for fd in (liveness, output, output_write):
            os.close(fd)
        answers = [pb.Answer.FromString(sock.recv(1000)) for _ in range(2)]
    assert answers[1].exited.exit_code == -signal.SIGKILL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused_even_when_the_folder_lets_him_in(start_template: Callable[..., Any]) -> None:
    template = start_template()
    open_up = [template.runtime_dir, *template.runtime_dir.parents]
    modes = {path: path.stat().st_mode for path in open_up if not path.stat().st_mode & 0o001}
    for path in modes:
        path.chmod(0o755)
    os.chmod(template.place.socket, 0o666)
    code = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
        "s.send(b'said before it is accepted'); print('sent', flush=True)\n"
        "sys.stdout.buffer.write(s.recv(1000))\n"
    )
    template.process.send_signal(signal.SIGSTOP)
    try:
        command = ["/usr/bin/env", sys.executable, "-c", code, template.place.socket]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"sent\n"
            template.process.send_signal(signal.SIGCONT)
            answer, _ = stranger.communicate(timeout=TIMEOUT_S)
    finally:
        template.process.send_signal(signal.SIGCONT)
        for path, mode in modes.items():
            path.chmod(mode)
    assert stranger.returncode == 0
    refused = pb.Answer.FromString(answer).refused
    assert refused.reason == pb.Refused.NOT_ALLOWED
    assert "65534" in refused.message


def test_other_code_makes_it_leave_when_its_cores_have_ended(
    start_template: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    template = start_template()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "daemon.sock"))
    listener.listen()
    running = template.fork("--config-json", config_of(tmp_path))
    stale = template.fork(*NO_DAEMON, fingerprint="0" * 64)
    assert stale.answer.refused.reason == pb.Refused.STALE
    assert not os.path.exists(template.place.socket)
    successor = start_template(template.runtime_dir)
    assert template.process.poll() is None
    os.kill(running.pid, signal.SIGKILL)
    assert running.exit_code() == -signal.SIGKILL
    assert template.process.wait(TIMEOUT_S) == 0
    assert_serves(successor)
    for fork in (running, stale):
        fork.close()
    listener.close()


def test_a_second_template_leaves_the_first_alone(template: Any) -> None:
    command = [sys.executable, "-P", "-m", "preload.engine.template", "--runtime-dir", str(template.runtime_dir)]
    second = subprocess.run([*command, "--detached"], timeout=TIMEOUT_S)
    assert second.returncode == 0
    assert_serves(template)


def test_the_socket_of_a_killed_template_is_replaced(start_template: Callable[..., Any]) -> None:
    killed = start_template()
    killed.process.kill()
    killed.process.wait()
    assert os.path.exists(killed.place.socket)
    assert_serves(start_template(killed.runtime_dir))


def test_it_ends_on_sigterm_and_takes_its_socket_along(start_template: Callable[..., Any]) -> None:
    template = start_template()
    assert template.end() == 0
    assert not os.path.exists(template.place.socket)


def test_it_ends_when_its_folder_is_gone(start_template: Callable[..., Any]) -> None:
    template = start_template()
    shutil.rmtree(template.runtime_dir)
    assert template.process.wait(TIMEOUT_S) == 0


def test_a_client_is_told_why_there_is_no_fork(start_template: Callable[..., Any], tmp_path: Path) -> None:
    import asyncio

    template = start_template()
    os.kill(template.pid, signal.SIGSTOP)
    try:
        with pytest.raises(NoForkError, match="no answer within"):
            asyncio.run(fork_core(template.place, NO_DAEMON))
    finally:
        os.kill(template.pid, signal.SIGCONT)
    template.process.kill()
    template.process.wait()
    with pytest.raises(NoForkError) as absent:
        asyncio.run(fork_core(template.place, NO_DAEMON))
    assert absent.value.is_absent
