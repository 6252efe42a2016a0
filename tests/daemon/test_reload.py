"""SIGHUP to a daemon: what can change does, and a wrong configuration changes nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.daemon.doors import is_open_to_some
from preload.protos import weight_cache_pb2 as pb


class Reloaded:
    """A daemon with a configuration file and a service manager to talk to."""

    def __init__(self, daemon: Any, path: Path, manager: socket.socket, wait_for: Callable[..., Any]) -> None:
        self.daemon = daemon
        self.path = path
        self._manager = manager
        self._wait_for = wait_for

    def reload(self, text: str) -> list[str]:
        """Lines that the manager heard of the reload, from RELOADING=1 to READY=1."""
        self.path.write_text(text)
        os.kill(self.daemon.pid, signal.SIGHUP)
        return [*self.hear("RELOADING=1"), *self.hear("READY=1")]

    def hear(self, word: str) -> list[str]:
        while True:
            lines = self._manager.recv(4096).decode().split("\n")
            if word in lines:
                return lines

    def ready_paths(self) -> list[str]:
        found = [g for g in self.daemon.generations() if g.state == pb.GENERATION_STATE_READY]
        return sorted(path for generation in found for path in generation.checkpoint_paths)

    def wait_for_log(self, text: str) -> None:
        self._wait_for(lambda: text in self.daemon.log, f"{text!r} in the log")


@pytest.fixture
def reloaded(
    make_daemon: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reloaded]:
    path = tmp_path / "preload.toml"
    path.write_text('[daemon]\nhost_limit = "1G"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify.sock"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify.sock"))
        made = Reloaded(make_daemon("--config", str(path)), path, manager, wait_for)
        made.hear("READY=1")
        yield made


def test_limits_and_models_follow_the_file(
    reloaded: Reloaded, write_safetensors: Callable[..., Path], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    checkpoints = [
        write_safetensors(tmp_path / f"{name}.safetensors", {"a": ("U8", [4], name.encode() * 4)}) for name in "xy"
    ]
    models = [f'[[models]]\ncheckpoint = "{path}"\nmodel = "raw"\n' for path in checkpoints]
    lines = reloaded.reload('[daemon]\nhost_limit = "2G"\n' + models[0])
    assert lines[0] == "RELOADING=1"
    assert lines[1].startswith("MONOTONIC_USEC=")
    assert reloaded.daemon.device().capacity_bytes == 2 << 30
    wait_for(lambda: reloaded.ready_paths() == [str(checkpoints[0])], "the model to be loaded")
    (serial,) = (generation.serial for generation in reloaded.daemon.generations())
    reloaded.reload('[daemon]\nhost_limit = "2G"\n' + "".join(models))
    wait_for(lambda: reloaded.ready_paths() == sorted(map(str, checkpoints)), "the second model to be loaded")
    assert serial in [generation.serial for generation in reloaded.daemon.generations()], "the first stays"


def test_a_wrong_file_changes_nothing(reloaded: Reloaded) -> None:
    for text, what in (
        ('[daemon]\nhost_limit = "much"\nallow_uids = [4711]\n', "memory limit 'much'"),
        ("[daemon", "preload.toml"),
        ("[daemon]\ncolour = 1\n", "unknown key daemon.colour"),
    ):
        lines = reloaded.reload(text)
        assert any(line.startswith("STATUS=the configuration is refused") and what in line for line in lines)
        reloaded.wait_for_log(what)
        assert not is_open_to_some(reloaded.daemon.runtime_dir)
        assert reloaded.daemon.device().capacity_bytes == 1 << 30
    reloaded.path.unlink()
    os.kill(reloaded.daemon.pid, signal.SIGHUP)
    reloaded.wait_for_log(f"configuration {reloaded.path}: No such file")
    assert reloaded.daemon.device().capacity_bytes == 1 << 30


def test_what_needs_a_restart_is_named_and_ignored(reloaded: Reloaded) -> None:
    with reloaded.daemon.control() as control:
        before = control.list().http_address
    reloaded.reload('[daemon]\nhost_limit = "3G"\nmax_loaders = 7\nhttp_host = "127.0.0.2"\n')
    reloaded.wait_for_log("max_loaders changes with a restart only: ignored")
    reloaded.wait_for_log("http_host changes with a restart only: ignored")
    assert reloaded.daemon.device().capacity_bytes == 3 << 30, "the rest is applied"
    with reloaded.daemon.control() as control:
        assert control.list().http_address == before


def test_options_of_the_command_line_stay_before_the_file(
    make_daemon: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    path = tmp_path / "preload.toml"
    path.write_text("")
    daemon = make_daemon("--config", str(path), "--host-limit", "1G")
    path.write_text('[daemon]\nhost_limit = "2G"\nreclaim_timeout_s = 7\n')
    os.kill(daemon.pid, signal.SIGHUP)
    wait_for(lambda: "changed: reclaim_timeout_s" in daemon.log, "the reload")
    assert daemon.device().capacity_bytes == 1 << 30


def test_users_are_allowed_and_barred_by_a_reload(reloaded: Reloaded) -> None:
    assert not is_open_to_some(reloaded.daemon.runtime_dir)
    reloaded.reload('[daemon]\nhost_limit = "1G"\nallow_uids = [4711]\n')
    assert is_open_to_some(reloaded.daemon.runtime_dir)
    reloaded.reload('[daemon]\nhost_limit = "1G"\n')
    assert not is_open_to_some(reloaded.daemon.runtime_dir)


def test_a_reload_neither_hides_nor_touches_what_lies_in_the_place_of_a_socket(reloaded: Reloaded) -> None:
    """Twice the same: who reloads is told that nobody can reach this daemon, and another's socket stays as it is."""
    with reloaded.daemon.control() as control:
        address = control.list().http_address
    path = reloaded.daemon.runtime_dir / "daemon.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        path.chmod(0o666)
        reloaded.wait_for_log(f"{path} is gone, or another daemon's")
        for _ in range(2):
            lines = reloaded.reload(f'[daemon]\nhost_limit = "1G"\nallow_uids = [{os.geteuid()}]\n')
            assert f"STATUS={path} is gone, or another daemon's" in lines[-1]
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://{address}/ready", timeout=60)
            assert refused.value.code == 503
            assert str(path) in json.loads(refused.value.read())["trouble"]
        assert path.stat().st_mode & 0o777 == 0o666
        assert not is_open_to_some(path)
    assert reloaded.daemon.stop() == 0
