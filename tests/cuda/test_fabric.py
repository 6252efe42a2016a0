"""Fabric handles: offered beside descriptors where the device has them, for who cannot fetch a descriptor."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes"
MIB = 1 << 20
HAS_VMM, HAS_FD, HAS_IPC, HAS_FABRIC = 1, 2, 8, 16
NOT_PERMITTED, NOT_SUPPORTED = 800, 801
RAW = {"model": "raw"}


@pytest.fixture
def machine(tmp_path: Path, load_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """One GPU on a fabric, and one that is not."""
    machines = load_module("fakes/cuda_machine.py")
    on_fabric = machines.Gpu(64 * MIB, flags=HAS_VMM | HAS_FD | HAS_IPC | HAS_FABRIC)
    made = machines.Machine(tmp_path, [on_fabric, machines.Gpu(64 * MIB)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def kept(machine: Any, make_daemon: Any) -> Any:
    command = [sys.executable, "-P", "-m", "preload.cli.main", "daemon"]
    return make_daemon(command=[sys.executable, str(FAKES / "run_keeper.py"), json.dumps(command)])


def without_handover(daemon: Any) -> None:
    """As a container sees it that has been given the gRPC socket only."""
    (daemon.runtime_dir / "segments.sock").unlink()


def test_an_importer_without_the_handover_socket_maps_by_the_fabric_handle(
    machine: Any, kept: Any, raw_checkpoint: Path, load_on: Any, hold: Any, wait_for: Any
) -> None:
    device = machine.device(0)
    load_on(kept, raw_checkpoint, device)
    by_descriptor = hold(kept, raw_checkpoint, recipe=RAW, device=device)
    wanted = by_descriptor.ask("digest a")
    without_handover(kept)
    by_handle = hold(kept, raw_checkpoint, recipe=RAW, device=device)
    assert by_handle.ask("digest a") == wanted
    live = machine.process(by_handle.pid).live
    assert (live["handles"], live["mappings"]) == (0, 1)
    assert machine.used_bytes(0) == 2 * MIB
    with kept.control() as control:
        os.kill(control.list().pid, signal.SIGKILL)
    assert (by_handle.event()[0], by_handle.event()[0]) == ("lost", "reclaimed")
    without_handover(kept)
    assert hold(kept, raw_checkpoint, recipe=RAW, device=device).ask("digest a") == wanted, "the next life has it too"


def test_a_fabric_handle_maps_read_only(
    machine: Any, make_daemon: Any, raw_checkpoint: Path, load_on: Any, hold: Any
) -> None:
    daemon = make_daemon()
    load_on(daemon, raw_checkpoint, machine.device(0))
    without_handover(daemon)
    writer = hold(daemon, raw_checkpoint, recipe=RAW, device=machine.device(0), tensors="torch")
    writer.tell("write a")
    assert writer.process.wait(60) == -signal.SIGSEGV


def test_a_device_without_fabric_has_none_and_a_missing_socket_is_the_error(
    machine: Any, make_daemon: Any, raw_checkpoint: Path, load_on: Any, hold: Any
) -> None:
    daemon = make_daemon()
    load_on(daemon, raw_checkpoint, machine.device(1))
    without_handover(daemon)
    refused = hold(daemon, raw_checkpoint, recipe=RAW, device=machine.device(1)).opening
    assert refused["error"] == "DaemonUnreachableError"
    assert "hand-over socket" in refused["message"]


@pytest.mark.parametrize("status", [NOT_PERMITTED, NOT_SUPPORTED])
def test_a_fabric_that_nobody_set_up_is_done_without(
    machine: Any, make_daemon: Any, raw_checkpoint: Path, load_on: Any, hold: Any, status: int
) -> None:
    daemon = make_daemon()
    machine.inject("cuMemCreate", status, process="preload")
    load_on(daemon, raw_checkpoint, machine.device(0))
    assert "has no fabric handles here: cuMemCreate failed with CUDA_ERROR_NOT_" in daemon.log
    assert hold(daemon, raw_checkpoint, recipe=RAW, device=machine.device(0)).ask("touch") > 0
    created = machine.process(daemon.pid).calls["cuMemCreate"]
    load_on(daemon, raw_checkpoint, "host")
    with daemon.control() as control:
        for generation in control.list().generations:
            assert generation.backend in ("cuda_vmm", "host")
    assert created == 2, "it is tried with the fabric once, and then without"
