"""Weights in memory of emulated GPUs: loaded, attached to, verified, moved through a daemon's death, given back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client.control import make_selector
from preload.engine.errors import CorruptedError, DeviceError, NoMemoryError, NotResidentError, RequestError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

FAKES = Path(__file__).parents[1] / "fakes"
MIB = 1 << 20
GRANULARITY = 2 * MIB
HOLDER_CALLS = {
    "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease", "cuCtxSetCurrent", "cuCtxSynchronize", "cuMemAlloc", "cuMemFree",
    "cuIpcGetMemHandle",
}  # fmt: skip
DAEMON_CALLS = {
    "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDeviceTotalMem", "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease",
}  # fmt: skip


def content(path: Path) -> bytes:
    """What the tensor "a" of `raw_checkpoint` holds: the first 4096 bytes after the header."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return data[start : start + 4096]


def test_a_load_fills_device_memory_and_engines_map_it(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any, hold: Any
) -> None:
    loaded = load_on(daemon, raw_checkpoint, device)
    assert (loaded.device, loaded.state, loaded.resident_bytes) == (device, pb.GENERATION_STATE_READY, GRANULARITY)
    assert (machine.used_bytes(0), machine.used_bytes(1)) == (GRANULARITY, 0)
    first, second = (
        hold(daemon, raw_checkpoint, recipe={"model": "raw"}, device=device, tensors=kind)
        for kind in ("buffers", "torch")
    )
    assert first.ask("digest a") == hashlib.sha256(content(raw_checkpoint)).hexdigest()
    assert machine.used_bytes(0) == GRANULARITY, "two engines map the same memory"
    for holder in (first, second):
        live = machine.process(holder.pid).live
        assert (live["handles"], live["mappings"] + live["imports"], live["contexts"]) == (0, 1, 1)


def test_the_daemon_makes_no_context_and_maps_nothing(
    machine: Any, daemon: Any, device: str, backend: str, raw_checkpoint: Path, load_on: Any, owner_pid: Any
) -> None:
    load_on(daemon, raw_checkpoint, device)
    if backend == "cuda_vmm":
        process = machine.process(daemon.pid)
        assert set(process.calls) <= DAEMON_CALLS
        assert process.num_live == 0, "descriptors are all that it holds"
        return
    assert daemon.pid not in [process.pid for process in machine.processes()], "it leaves the driver to the holder"
    holder = machine.process(owner_pid(daemon))
    assert set(holder.calls) <= HOLDER_CALLS
    assert {name: count for name, count in holder.live.items() if count} == {"contexts": 1, "allocations": 1}


def test_a_loader_leaves_nothing_behind(
    machine: Any, daemon: Any, device: str, sparse_checkpoint: Any, load_on: Any
) -> None:
    load_on(daemon, sparse_checkpoint(4, 9 * MIB), device)
    (loader,) = [p for p in machine.processes() if "loading.loader" in p.command and p.calls.get("cuMemHostAlloc")][
        -1:
    ]
    assert (loader.is_alive, loader.num_live) == (False, 0)
    assert loader.calls["cuEventSynchronize"] > 0, "its pinned buffers are used again and again"


def test_the_same_checkpoint_can_be_on_several_devices(
    machine: Any, daemon: Any, raw_checkpoint: Path, load_on: Any, attacher: Any
) -> None:
    where = ["host", machine.device(0), machine.device(1)]
    ids = {load_on(daemon, raw_checkpoint, name).id for name in where}
    assert len(ids) == 1, "content and recipe are the identity"
    assert (machine.used_bytes(0), machine.used_bytes(1)) == (GRANULARITY, GRANULARITY)
    for name in where:
        assert attacher(daemon, checkpoint=raw_checkpoint, device=name)("attach")["device"] == name
    (generation_id,) = ids
    said = attacher(daemon, generation_id=generation_id)("attach")
    assert said["error"] == "RequestError"
    assert "ambiguous" in said["message"]
    with daemon.control() as control:
        control.evict(make_selector(generation_id=generation_id, device=where[1]))
        assert {g.device for g in control.list().generations} == {where[0], where[2]}
        assert [d.name for d in control.list().devices] == where


def test_an_attach_elsewhere_is_told_where_the_weights_are(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any
) -> None:
    load_on(daemon, raw_checkpoint, device)
    with daemon.control() as control, pytest.raises(NotResidentError, match=f"but on {device}"):
        control.check(make_selector(raw_checkpoint, recipe=Recipe(model="raw"), device=machine.device(1)))


def test_verify_reads_device_memory_back_and_finds_what_was_changed(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any, owner_pid: Any
) -> None:
    loaded = load_on(daemon, raw_checkpoint, device)
    selector = make_selector(generation_id=loaded.id)
    with daemon.control() as control:
        assert list(control.verify(selector, timeout_s=60))[-1].verified.num_tensors == 3
        overwrite(machine, owner_pid(daemon))
        with pytest.raises(CorruptedError, match="differ from the manifest in a"):
            list(control.verify(selector, timeout_s=60))


def overwrite(machine: Any, pid: int) -> None:
    """A byte of the segment, as a broken kernel of somebody's would."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process opens and closes others meanwhile
            if os.readlink(entry).startswith(f"/memfd:fakecuda:{machine.id}"):
                with entry.open("r+b") as file:
                    byte = file.read(1)[0]
                    file.seek(0)
                    file.write(bytes([byte ^ 1]))
                return
    raise AssertionError("the daemon holds no device memory")


def test_a_stray_write_kills_the_writer_and_not_the_weights_or_is_found_out(
    daemon: Any, device: str, backend: str, raw_checkpoint: Path, load_on: Any, hold: Any, machine: Any
) -> None:
    loaded = load_on(daemon, raw_checkpoint, device)
    options = {"recipe": {"model": "raw"}, "device": device}
    writer = hold(daemon, raw_checkpoint, tensors="torch", **options)
    reader = hold(daemon, raw_checkpoint, **options)
    if backend == "cuda_ipc":  # the driver maps an IPC handle writable, always
        assert writer.ask("write a") == "a"
        with daemon.control() as control, pytest.raises(CorruptedError, match="differ from the manifest in a"):
            list(control.verify(make_selector(generation_id=loaded.id), timeout_s=60))
        return
    writer.tell("write a")
    assert writer.process.wait(60) == -signal.SIGSEGV
    assert reader.ask("digest a") == hashlib.sha256(content(raw_checkpoint)).hexdigest()


def test_driver_calls_of_an_attach_do_not_depend_on_the_number_of_tensors(
    machine: Any, daemon: Any, device: str, sparse_checkpoint: Any, load_on: Any, attacher: Any
) -> None:
    counts = []
    for num_tensors in (3, 2000):
        path = sparse_checkpoint(num_tensors, 4096, f"n{num_tensors}")
        load_on(daemon, path, device)
        ask = attacher(daemon, checkpoint=path, device=device)
        assert ask("attach")["num_tensors"] == num_tensors
        counts.append(machine.process(ask("pid")["pid"]).calls)
    segments = [-(-num * 4096 // (8 << 30)) for num in (3, 2000)]
    assert segments == [1, 1]
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) < 30


def test_memory_of_a_mapped_generation_is_back_when_its_last_holder_ends(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any, hold: Any, wait_for: Any
) -> None:
    loaded = load_on(daemon, raw_checkpoint, device)
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"}, device=device)
    with daemon.control() as control:
        answer = control.evict(make_selector(generation_id=loaded.id))
    assert not answer.freed
    assert machine.used_bytes(0) == GRANULARITY
    assert holder.ask("touch") > 0
    holder.end()
    wait_for(lambda: machine.used_bytes(0) == 0, "the device's memory to be back")


def test_a_load_that_exceeds_the_device_is_refused_with_the_numbers(
    machine: Any, daemon: Any, device: str, sparse_checkpoint: Any, raw_checkpoint: Path, load_on: Any
) -> None:
    load_on(daemon, raw_checkpoint, device)
    with pytest.raises(
        NoMemoryError, match=r"needs 159,\S+ bytes, but of a limit of 134,217,728 bytes 2,097,152 are"
    ):
        load_on(daemon, sparse_checkpoint(5, 30 * MIB), device)
    assert machine.used_bytes(0) == GRANULARITY


def test_memory_that_others_hold_is_not_there_and_the_refusal_says_so(
    machine: Any, daemon: Any, sparse_checkpoint: Any, load_on: Any, attacher: Any, make_daemon: Any
) -> None:
    other = make_daemon("--device-limit", "100%")
    load_on(other, sparse_checkpoint(1, 100 * MIB, "other"), machine.device(1))
    with pytest.raises(NoMemoryError, match=r"of 41,943,040 bytes does not fit into what others leave of the device"):
        load_on(daemon, sparse_checkpoint(1, 39 * MIB, "mine"), machine.device(1))
    with daemon.control() as control:
        assert {(d.reserved_bytes, d.resident_bytes) for d in control.list().devices} == {(0, 0)}


def test_eviction_makes_room_on_the_device_that_needs_it(
    machine: Any, daemon: Any, device: str, sparse_checkpoint: Any, raw_checkpoint: Path, load_on: Any
) -> None:
    load_on(daemon, raw_checkpoint, "host")
    load_on(daemon, sparse_checkpoint(1, 100 * MIB, "old"), device)
    with daemon.control() as control:
        path = sparse_checkpoint(1, 101 * MIB, "new")
        *_, last = control.load(path, Recipe(model="raw"), device=device, evict_lru=True, timeout_s=60)
        assert {(g.device, g.id == last.loaded.id) for g in control.list().generations} == {
            ("host", False),
            (device, True),
        }


def test_a_killed_loader_returns_the_memory(
    machine: Any,
    device: str,
    backend: str,
    make_daemon: Any,
    gate: Any,
    raw_checkpoint: Path,
    wait_for: Any,
    load_on: Any,
) -> None:
    daemon = make_daemon("--drain-timeout-s", "0.2", "--device-memory", backend, command=gate.command())
    gate.stop_at(gate.HEADER)
    with daemon.control() as control:
        events = control.load(raw_checkpoint, Recipe(model="raw"), device=device, timeout_s=60)
        next(events)
        pid = gate.loader_pid()
        wait_for(lambda: machine.used_bytes(0) == GRANULARITY, "the segment to be there")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception, match="killed by SIGKILL"):
            list(events)
        wait_for(lambda: machine.used_bytes(0) == 0, "the device's memory to be back")
        assert {d.reserved_bytes for d in control.list().devices} == {0}
    gate.open()
    assert load_on(daemon, raw_checkpoint, device).state == pb.GENERATION_STATE_READY


def test_a_daemon_that_is_killed_leaves_device_memory_to_its_next_life(
    machine: Any,
    device: str,
    backend: str,
    make_daemon: Any,
    raw_checkpoint: Path,
    load_on: Any,
    hold: Any,
    wait_for: Any,
) -> None:
    command = [sys.executable, "-P", "-m", "preload.cli.main", "daemon"]
    kept = make_daemon(
        "--device-memory", backend, command=[sys.executable, str(FAKES / "run_keeper.py"), json.dumps(command)]
    )
    wanted = hashlib.sha256(content(raw_checkpoint)).hexdigest()
    loaded = load_on(kept, raw_checkpoint, device)
    holder = hold(kept, raw_checkpoint, recipe={"model": "raw"}, device=device)
    raw_checkpoint.unlink()
    with kept.control() as control:
        pid = control.list().pid
    os.kill(pid, signal.SIGKILL)
    assert holder.event()[0] == "lost"
    assert holder.event() == ("reclaimed", "2")
    assert machine.used_bytes(0) == GRANULARITY
    other = hold(kept, generation_id=loaded.id, device=device)
    assert (other.ask("digest a"), holder.ask("digest a")) == (wanted, wanted)
    with kept.control() as control:
        listed = control.list()
        assert [d.resident_bytes for d in listed.devices if d.name == device] == [GRANULARITY]
        assert listed.pid not in [p.pid for p in machine.processes()], "serving again needs no driver"
        holder.end()
        other.end()
        control.evict(make_selector(generation_id=loaded.id))
    wait_for(lambda: machine.used_bytes(0) == 0, "the device's memory to be back")


@pytest.mark.parametrize("order", ["{1}", "GPU-{uuid},0", "GPU-{short}"])
def test_an_index_means_what_the_caller_sees(
    machine: Any, daemon: Any, cli: Any, raw_checkpoint: Path, order: str
) -> None:
    uuid = machine.device(1).removeprefix("cuda:GPU-")
    visible = order.format(0, 1, uuid=uuid, short=uuid[:10])
    words = ("load", str(raw_checkpoint), "--model", "raw", "--device", "cuda:0", "--json")
    done = cli(*words, "--runtime-dir", str(daemon.runtime_dir), env={"CUDA_VISIBLE_DEVICES": visible})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == machine.device(1)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("cuda:7", DeviceError, "this process sees"),
        ("cuda:x", RequestError, "unknown device"),
        ("GPU-00000000", DeviceError, "the beginning of 0 devices"),
    ],
)
def test_a_device_that_is_not_there_is_told_from_no_device(
    daemon: Any, cli: Any, raw_checkpoint: Path, name: str, error: Any, words: str
) -> None:
    done = cli("check", str(raw_checkpoint), "--device", name, "--json", "--runtime-dir", str(daemon.runtime_dir))
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == (27 if error is DeviceError else 2)
    assert words in told["message"]


def test_the_daemon_does_not_know_the_device(daemon: Any, raw_checkpoint: Path, load_on: Any) -> None:
    unknown = "cuda:GPU-00000000-0000-0000-0000-000000000000"
    with pytest.raises(DeviceError, match="the daemon's driver shows no device"):
        load_on(daemon, raw_checkpoint, unknown)
    assert all(g.device != unknown for g in daemon.generations())


def test_the_bench_shows_that_driver_calls_do_not_grow_with_tensors(
    cli: Any, machine: Any, demo_model: Path, backend: str
) -> None:
    words = ("bench", "attach", "--device", "cuda:1", "-n", "2", "--json", "--checkpoint", str(demo_model))
    done = cli(*words, "--device-memory", backend)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["device"], result["device_memory"]) == (machine.device(1), backend)
    assert len(result["by_tensors"]) == 3
    assert len({found["driver_calls"] for found in result["by_tensors"].values()}) == 1
