"""The daemon as a process: its folder, its signals, its configuration, and what it must not grow."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")
SOCKETS = {"daemon.sock", "segments.sock"}


def run_daemon(runtime_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected to end by itself."""
    command = [sys.executable, "-P", "-m", "preload.cli.main", "daemon", "--runtime-dir", str(runtime_dir), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_with_0_and_without_sockets(
    daemon: Any, raw_checkpoint: Path, number: signal.Signals
) -> None:
    daemon.load(raw_checkpoint, model="raw")
    daemon.process.send_signal(number)
    assert daemon.process.wait(60) == 0
    assert not SOCKETS & {path.name for path in daemon.runtime_dir.iterdir()}
    assert "Traceback" not in daemon.log


def test_a_signal_during_a_load_takes_the_loader_along(
    make_daemon: Callable[..., Any], gate: Any, raw_checkpoint: Path, start_load: Callable[..., Any]
) -> None:
    daemon = make_daemon("--drain-timeout-s", "5", command=gate.command())
    gate.stop_at(gate.HEADER)
    call = start_load(daemon, raw_checkpoint, model="raw")
    loader = gate.loader_pid()
    assert daemon.stop() == 0
    assert "the daemon is stopping" in call.join().error.details()
    with pytest.raises(ProcessLookupError):
        os.kill(loader, 0)


def test_a_loader_whose_daemon_is_killed_ends_too(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, start_load: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    gate.stop_at(gate.HEADER)
    start_load(gated_daemon, raw_checkpoint, model="raw")
    loader = gate.loader_pid()
    gated_daemon.kill()
    gate.open()

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{loader}/stat").read_text().split()[2] == "Z"
        except FileNotFoundError:
            return True

    wait_for(is_gone, "the orphaned loader to end")


def test_a_second_daemon_in_the_folder_is_refused_and_the_first_unharmed(daemon: Any, raw_checkpoint: Path) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    second = run_daemon(daemon.runtime_dir)
    assert second.returncode == 2
    assert f"another daemon serves in {daemon.runtime_dir}" in second.stderr
    assert "Traceback" not in second.stderr
    with attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        assert attachment.generation_id == loaded.id


def test_sockets_of_a_killed_predecessor_are_replaced(daemon: Any, raw_checkpoint: Path) -> None:
    daemon.kill()
    assert {path.name for path in daemon.runtime_dir.iterdir()} >= SOCKETS
    daemon.start()
    with daemon.control() as control:
        assert control.list().epoch == 2
    loaded = daemon.load(raw_checkpoint, model="raw")
    with attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        assert attachment.generation_id == loaded.id


def test_a_folder_whose_sockets_would_not_fit_is_refused(tmp_path: Path) -> None:
    refused = run_daemon(tmp_path / ("x" * 110))
    assert refused.returncode == 2
    assert "too long" in refused.stderr
    assert "107" in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    refused = run_daemon(folder)
    assert refused.returncode == 2
    assert "belongs to user 65534" in refused.stderr


def test_a_taken_probe_port_ends_the_daemon_with_a_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = run_daemon(tmp_path / "run", "--http-port", str(port))
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}; choose another --http-port" in ended.stderr
    assert not SOCKETS & {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("daemon = 3", "one table [daemon]"),
        ("[models]\ncheckpoint = '/x'", "any number of [[models]]"),
        ("[[models]]\ncheckpoint = 'relative'", "must be an absolute path"),
        ("[[models]]\ncheckpoint = '/x'\nquantization = 4", "models.quantization must be a string"),
        ("[[models]]\ncheckpoint = '/x'\nconfig_overrides = '{}'", "models.config_overrides must be a table"),
        ("[[models]]\ncheckpoint = '/x'\nquantisation = 'keep'", "unknown key models.quantisation"),
        ("[daemon]\nhost_limit = '120%'", "memory limit '120%'"),
        ("[daemon]\nport = 1", "unknown key daemon.port"),
        ("[daemon", "config.toml"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    refused = run_daemon(tmp_path / "run", "--config", str(path), "--http-port", "0")
    assert refused.returncode == 2
    assert what in refused.stderr
    assert "Traceback" not in refused.stderr


def test_models_of_the_configuration_are_loaded_on_boot(
    make_daemon: Callable[..., Any], llama: Any, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    folder = llama.folder(tmp_path / "llama")
    path = tmp_path / "config.toml"
    path.write_text(
        f"[daemon]\nhost_limit = '1G'\n\n[[models]]\ncheckpoint = '{folder}'\n\n"
        f"[[models]]\ncheckpoint = '{folder}'\nquantization = 'bf16'\nconfig_overrides = {{ rope_theta = 5e4 }}\n"
    )
    daemon = make_daemon("--config", str(path))
    wait_for(lambda: [g.state for g in daemon.generations()] == [pb.GENERATION_STATE_READY] * 2, "two models")
    assert daemon.device().capacity_bytes == 1 << 30
    for recipe in (Recipe(), Recipe(quantization="bf16", config_overrides={"rope_theta": 5e4})):
        with attach(folder, recipe=recipe, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
            assert attachment.resolved_recipe["quantization"] == recipe.quantization


def num_descriptors(daemon: Any) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def resident_kib(daemon: Any) -> int:
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


ATTACH_REPEATEDLY = """
import os, signal, sys
from preload.engine.client import attach
for number in range(20):
    if (pid := os.fork()) == 0:
        attachment = attach(generation_id=sys.argv[2], runtime_dir=sys.argv[1], tensors="buffers")
        assert len(attachment.tensors) == 3
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
"""
"""A process that imported the client, without a channel of its own, forks attachers that are killed attached."""


def test_two_hundred_killed_attachers_leave_nothing_behind(
    daemon: Any, raw_checkpoint: Path, llama: Any, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    daemon.load(llama.folder(tmp_path / "llama"))
    loaded = daemon.load(raw_checkpoint, model="raw")
    with attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers"):
        pass
    wait_for(lambda: not any(g.leases for g in daemon.generations()), "the daemon to be idle")
    device = daemon.device()
    before = num_descriptors(daemon)
    command = [sys.executable, "-c", ATTACH_REPEATEDLY, str(daemon.runtime_dir), loaded.id]
    pool = [subprocess.Popen(command) for _ in range(2)]
    for _ in range(8):
        assert pool.pop(0).wait(60) == 0
        pool.append(subprocess.Popen(command))
    assert [process.wait(60) for process in pool] == [0, 0]
    wait_for(lambda: not any(g.leases for g in daemon.generations()), "every lease to end")
    attaches = {g.id: g.num_attaches for g in daemon.generations()}
    assert attaches[loaded.id] == 201
    assert daemon.device() == device
    wait_for(lambda: num_descriptors(daemon) <= before, "every descriptor to be closed")
    assert resident_kib(daemon) <= 80 * 1024
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert not [line for line in maps.splitlines() if "torch" in line or "numpy" in line]
    assert "memfd:preload" not in maps, "the daemon maps no weights"


@pytest.mark.by_descriptor
def test_the_daemon_keeps_one_descriptor_for_each_segment(
    daemon: Any, raw_checkpoint: Path, tested_backend: str
) -> None:
    from preload.engine.client.control import make_selector

    def segments() -> list[str]:
        names = []
        for fd in os.listdir(f"/proc/{daemon.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed while we looked
                names.append(os.readlink(f"/proc/{daemon.pid}/fd/{fd}"))
        if tested_backend != "host":
            return [name for name in names if "memfd:fakecuda:" in name]
        return [name for name in names if "memfd:preload:" in name and f":{raw_checkpoint.name}" in name]

    loaded = daemon.load(raw_checkpoint, model="raw")
    assert len(segments()) == loaded.num_segments
    with daemon.control() as control:
        list(control.verify(make_selector(generation_id=loaded.id), timeout_s=60))
        assert len(segments()) == loaded.num_segments
        control.evict(make_selector(generation_id=loaded.id))
    assert segments() == []
