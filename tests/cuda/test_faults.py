"""Every driver call fails, in each process that makes it, in every way: a clear error, nothing left behind, and the
daemon serves on.

What is left is counted by the driver itself (memory by who holds it; handles, mappings, contexts by process), by the
kernel (descriptors) and by the daemon's ledger. Without `slow`, each call fails in one way; with it, in all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client.control import make_selector
from preload.engine.errors import DeviceError, NoMemoryError, PreloadError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

FAKES = Path(__file__).parents[1] / "fakes"
MIB = 1 << 20
OUT_OF_MEMORY, DEVICE_UNAVAILABLE, INVALID_HANDLE, NOT_SUPPORTED = 2, 46, 400, 801
NAMES = {OUT_OF_MEMORY: "OUT_OF_MEMORY", INVALID_HANDLE: "INVALID_HANDLE", NOT_SUPPORTED: "NOT_SUPPORTED",
         DEVICE_UNAVAILABLE: "DEVICE_UNAVAILABLE"}  # fmt: skip
STATUSES = tuple(NAMES)

FINDING = ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid"]
ENTERING = ["cuDeviceGetName", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
MAPPING = {
    "cuda_vmm": [
        "cuMemAddressReserve",
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemRelease",
    ],
    "cuda_ipc": ["cuIpcOpenMemHandle"],
}
UNMAPPING = {"cuda_vmm": ["cuMemUnmap", "cuMemAddressFree"], "cuda_ipc": ["cuIpcCloseMemHandle"]}
COPYING = ["cuStreamCreate", "cuMemHostAlloc", "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord",
           "cuEventSynchronize", "cuStreamSynchronize", "cuStreamDestroy", "cuEventDestroy",
           "cuMemFreeHost"]  # fmt: skip
LEAVING = ["cuDevicePrimaryCtxRelease"]
DESCRIBING = ["cuDeviceGetAttribute", "cuDeviceTotalMem", "cuMemGetAllocationGranularity"]
OWNING = {
    "cuda_vmm": ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease"],
    "cuda_ipc": ["cuMemAlloc", "cuIpcGetMemHandle", "cuMemFree"],
}
BACKENDS = tuple(MAPPING)


def matrix(calls_of: Callable[[str], list[str]], *, backends: tuple[str, ...] = BACKENDS) -> list[Any]:
    """(backend, call, status): all of them, most for the slow run only."""
    rows = []
    for backend in backends:
        for (place, call), (turn, status) in itertools.product(enumerate(calls_of(backend)), enumerate(STATUSES)):
            marks = [] if turn == place % len(STATUSES) else [pytest.mark.slow]
            rows.append(pytest.param(backend, call, status, marks=marks, id=f"{backend}-{call}-{NAMES[status]}"))
    return rows


def loader_calls(backend: str) -> list[str]:
    return [*FINDING, *ENTERING, *MAPPING[backend], *COPYING, *UNMAPPING[backend], *LEAVING]


def require_clear(error: PreloadError, call: str, status: int) -> None:
    """The message names the call and what the driver said of it."""
    assert type(error) is (NoMemoryError if status == OUT_OF_MEMORY else DeviceError), repr(error)
    assert call in error.message
    assert NAMES[status] in error.message


@pytest.fixture(scope="module")
def daemons_by_backend(machine: Any, make_shared_daemon: Callable[..., Any]) -> dict[str, Any]:
    options = ("--drain-timeout-s", "0.2", "--loader-threads", "1")
    return {backend: make_shared_daemon(*options, "--device-memory", backend) for backend in BACKENDS}


@pytest.fixture
def serving(
    machine: Any, device: str, daemons_by_backend: dict[str, Any], raw_checkpoint: Path, load_on: Any, wait_for: Any
) -> Iterator[Callable[[str], Any]]:
    """The daemon of a backend. Whatever the test does to it, afterwards it has nothing left of it and serves."""
    used = []

    def get(backend: str) -> Any:
        used.append((backend, daemons_by_backend[backend]))
        return daemons_by_backend[backend]

    yield get
    machine.heal()
    for backend, daemon in used:
        require_nothing_left(machine, daemon, backend, device, wait_for)
        loaded = load_on(daemon, raw_checkpoint, device)
        assert loaded.state == pb.GENERATION_STATE_READY
        with daemon.control() as control:
            control.evict(make_selector(generation_id=loaded.id))
        require_nothing_left(machine, daemon, backend, device, wait_for)


def require_nothing_left(machine: Any, daemon: Any, backend: str, device: str, wait_for: Any) -> None:
    with daemon.control() as control:
        for generation in control.list().generations:
            control.evict(make_selector(generation_id=f"@{generation.serial}"))
        listed = control.list()
    assert {(d.reserved_bytes, d.resident_bytes) for d in listed.devices} == {(0, 0)}
    wait_for(lambda: machine.used_bytes(0) == 0, "the memory to be back")
    holder = next((d.holder_pid for d in listed.devices if d.name == device), 0)
    for process in machine.processes():
        if process.pid == daemon.pid:
            left = process.live["handles"] if backend == "cuda_vmm" else process.num_live
            assert left <= 1, f"the daemon keeps {process.live}"  # one whose release failed is tried again
        elif process.pid == holder and process.is_alive:
            assert {k: v for k, v in process.live.items() if v} == {"contexts": 1}
    descriptors = [os.readlink(entry) for entry in Path(f"/proc/{daemon.pid}/fd").iterdir() if entry.is_symlink()]
    assert not [link for link in descriptors if "memfd" in link], "no descriptor of weights or tables is left"


@pytest.mark.parametrize(("backend", "call", "status"), matrix(loader_calls))
def test_what_fails_in_a_loader_fails_its_load_and_nothing_else(
    machine: Any,
    device: str,
    serving: Any,
    sparse_checkpoint: Any,
    load_on: Any,
    backend: str,
    call: str,
    status: int,
) -> None:
    daemon, path = serving(backend), sparse_checkpoint(1, 5 * MIB)
    machine.inject(call, status, process="loading.loader")
    with pytest.raises(PreloadError) as refusal:
        load_on(daemon, path, device)
    require_clear(refusal.value, call, status)
    assert machine.num_fired() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_call_of_each_name_may_fail_as_well_as_the_first(
    machine: Any, device: str, serving: Any, sparse_checkpoint: Any, load_on: Any, backend: str
) -> None:
    daemon, path = serving(backend), sparse_checkpoint(3, 3 * MIB)
    generation = load_on(daemon, path, device)
    (loader,) = [p for p in machine.processes() if "loading.loader" in p.command][-1:]
    assert set(loader.calls) <= set(loader_calls(backend)), "every call of a loader is in the matrix"
    with daemon.control() as control:
        control.evict(make_selector(generation_id=generation.id))
    for turn, call in enumerate(name for name, count in loader.calls.items() if count > 1):
        status = (OUT_OF_MEMORY, INVALID_HANDLE, NOT_SUPPORTED)[turn % 3]
        machine.inject(call, status, nth=loader.calls[call], process="loading.loader")
        with pytest.raises(PreloadError) as refusal:
            load_on(daemon, path, device)
        require_clear(refusal.value, call, status)
        machine.heal()


@pytest.mark.parametrize(
    ("backend", "call", "status"),
    matrix(lambda backend: ["cuMemcpyDtoH", *MAPPING[backend], *UNMAPPING[backend], *LEAVING]),
)
def test_what_fails_in_a_verification_says_nothing_of_the_weights(
    machine: Any, device: str, serving: Any, raw_checkpoint: Path, load_on: Any, backend: str, call: str, status: int
) -> None:
    daemon = serving(backend)
    loaded = load_on(daemon, raw_checkpoint, device)
    machine.inject(call, status, process="loading.loader")
    with daemon.control() as control:
        with pytest.raises(PreloadError) as refusal:
            list(control.verify(make_selector(generation_id=loaded.id), timeout_s=60))
        require_clear(refusal.value, call, status)
        machine.heal()
        assert control.check(make_selector(generation_id=loaded.id)) == loaded.id


@pytest.mark.parametrize(
    ("backend", "call", "status"),
    matrix(lambda backend: [*FINDING, *DESCRIBING, *OWNING[backend]], backends=("cuda_vmm",)),
)
def test_what_fails_in_the_daemon_fails_its_load_and_the_next_one_succeeds(
    machine: Any, device: str, make_daemon: Any, raw_checkpoint: Path, load_on: Any, wait_for: Any, hold: Any,
    backend: str, call: str, status: int,
) -> None:  # fmt: skip
    daemon = make_daemon("--device-memory", backend)
    machine.inject(call, status, process=str(daemon.runtime_dir))
    with pytest.raises(PreloadError) as refusal:
        load_on(daemon, raw_checkpoint, device)
    require_clear(refusal.value, call, status)
    machine.heal()
    load_on(daemon, raw_checkpoint, "host")
    if status == DEVICE_UNAVAILABLE:  # for all of this life
        with pytest.raises(DeviceError, match=r"CUDA_ERROR_DEVICE_UNAVAILABLE; a restart of the daemon"):
            load_on(daemon, raw_checkpoint, device)
        return
    load_on(daemon, raw_checkpoint, device)
    assert machine.process(daemon.pid).num_live == 0, "a handle that was not released is tried again"
    assert machine.used_bytes(0) == 2 * MIB
    assert hold(daemon, raw_checkpoint, recipe={"model": "raw"}, device=device).ask("touch") > 0


def holders_alive(machine: Any) -> set[int]:
    return {p.pid for p in machine.processes() if "daemon.holder" in p.command and p.is_alive}


STARTING = [*FINDING, "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]


@pytest.mark.parametrize(("backend", "call", "status"), matrix(lambda backend: STARTING, backends=("cuda_ipc",)))
def test_what_fails_in_a_holder_that_starts_fails_the_load_and_the_next_one_starts_another(
    machine: Any, device: str, make_daemon: Any, raw_checkpoint: Path, load_on: Any, backend: str, call: str,
    status: int,
) -> None:  # fmt: skip
    daemon = make_daemon("--device-memory", backend)
    before = holders_alive(machine)
    machine.inject(call, status, process="daemon.holder")
    with pytest.raises(PreloadError) as refusal:
        load_on(daemon, raw_checkpoint, device)
    require_clear(refusal.value, call, status)
    machine.heal()
    assert holders_alive(machine) == before
    load_on(daemon, raw_checkpoint, device)
    assert machine.used_bytes(0) == 2 * MIB


@pytest.mark.parametrize(
    ("backend", "call", "status"), matrix(lambda backend: OWNING[backend][:2], backends=("cuda_ipc",))
)
def test_what_fails_in_a_holder_fails_the_load_and_a_lost_device_what_it_holds(
    machine: Any, device: str, serving: Any, raw_checkpoint: Path, sparse_checkpoint: Any, load_on: Any, hold: Any,
    owner_pid: Any, wait_for: Any, backend: str, call: str, status: int,
) -> None:  # fmt: skip
    daemon = serving(backend)
    load_on(daemon, raw_checkpoint, device)
    importer = hold(daemon, raw_checkpoint, recipe={"model": "raw"}, device=device)
    holder = machine.process(owner_pid(daemon))
    machine.inject(call, status, nth=1 + holder.calls[call], process="daemon.holder")
    with pytest.raises(PreloadError) as refusal:
        load_on(daemon, sparse_checkpoint(1, MIB), device)
    require_clear(refusal.value, call, status)
    if status == DEVICE_UNAVAILABLE:
        assert importer.event()[0] == "failed"
        assert not holder.is_alive
    else:
        assert importer.ask("touch") > 0
        assert machine.used_bytes(0) == 2 * MIB
        assert owner_pid(daemon) == holder.pid
    importer.end()


@pytest.mark.parametrize("backend", ["cuda_ipc"])
@pytest.mark.parametrize("status", STATUSES, ids=NAMES.values())
def test_what_a_holder_cannot_free_at_once_is_freed_later(
    machine: Any, device: str, serving: Any, raw_checkpoint: Path, load_on: Any, owner_pid: Any, wait_for: Any,
    backend: str, status: int,
) -> None:  # fmt: skip
    daemon = serving(backend)
    loaded = load_on(daemon, raw_checkpoint, device)
    holder = machine.process(owner_pid(daemon))
    machine.inject("cuMemFree", status, nth=1 + holder.calls.get("cuMemFree", 0), process="daemon.holder")
    with daemon.control() as control:
        assert control.evict(make_selector(generation_id=loaded.id)).freed
    wait_for(lambda: machine.used_bytes(0) == 0, "the memory to be back")
    assert machine.num_fired() == 1
    wait_for(lambda: holder.is_alive == (status != DEVICE_UNAVAILABLE), "a holder without a device to end")


@pytest.mark.parametrize(
    ("backend", "call", "status"), matrix(lambda backend: [*FINDING, *ENTERING, *MAPPING[backend]])
)
def test_what_fails_in_an_attach_fails_it_and_the_next_one_succeeds(
    machine: Any, device: str, serving: Any, raw_checkpoint: Path, load_on: Any, attacher: Any, wait_for: Any,
    backend: str, call: str, status: int,
) -> None:  # fmt: skip
    daemon = serving(backend)
    load_on(daemon, raw_checkpoint, device)
    ask = attacher(daemon, checkpoint=raw_checkpoint, device=device)
    first, pid = ask("attach"), ask("pid")["pid"]
    machine.inject(call, status, nth=1 + machine.process(pid).calls[call], process="cuda_attacher")
    said = ask("attach")
    assert said["error"] == ("NoMemoryError" if status == OUT_OF_MEMORY else "DeviceError")
    assert f"{call} failed with CUDA_ERROR_{NAMES[status]}" in said["message"]
    with daemon.control() as control:
        assert not [lease for g in control.list().generations for lease in g.leases]
    if status == DEVICE_UNAVAILABLE:  # for this process; a new one is well
        assert attacher(daemon, checkpoint=raw_checkpoint, device=device)("attach") == first
        return
    assert machine.process(pid).num_live == 0, f"{call} left {machine.process(pid).live}"
    machine.heal()
    assert ask("attach") == first
    again = ask("fds")["num_fds"]
    assert ask("attach") == first
    wait_for(lambda: ask("fds")["num_fds"] <= again, "gRPC to close its own: no descriptor is left")


@pytest.mark.parametrize(("backend", "call", "status"), matrix(lambda backend: [*UNMAPPING[backend], *LEAVING]))
def test_an_engine_that_cannot_let_go_takes_it_with_it_when_it_ends(
    machine: Any, device: str, serving: Any, raw_checkpoint: Path, load_on: Any, attacher: Any, backend: str,
    call: str, status: int, wait_for: Any,
) -> None:  # fmt: skip
    daemon = serving(backend)
    loaded = load_on(daemon, raw_checkpoint, device)
    ask = attacher(daemon, checkpoint=raw_checkpoint, device=device)
    machine.inject(call, status, process="cuda_attacher")
    assert ask("attach")["num_tensors"] == 3
    pid = ask("pid")["pid"]
    assert machine.num_fired() == 1
    with daemon.control() as control:
        assert wait_for(lambda: not control.list().generations[0].leases, "the lease to end") or True
        assert control.evict(make_selector(generation_id=loaded.id)).freed
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: machine.used_bytes(0) == 0, "the memory to be back")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_life_of_a_daemon_serves_without_the_driver_and_fails_alike(
    machine: Any, device: str, make_daemon: Any, raw_checkpoint: Path, sparse_checkpoint: Any, load_on: Any,
    hold: Any, wait_for: Any, owner_pid: Any, backend: str,
) -> None:  # fmt: skip
    command = [sys.executable, "-P", "-m", "preload.cli.main", "daemon"]
    words = [sys.executable, str(FAKES / "run_keeper.py"), json.dumps(command)]
    kept = make_daemon("--device-memory", backend, command=words)
    loaded = load_on(kept, raw_checkpoint, device)
    importer = hold(kept, raw_checkpoint, recipe={"model": "raw"}, device=device)
    lost_first = (DEVICE_UNAVAILABLE, OUT_OF_MEMORY, INVALID_HANDLE, NOT_SUPPORTED)
    for place, status in enumerate(lost_first):
        with kept.control() as control:
            os.kill(control.list().pid, signal.SIGKILL)
        assert (importer.event()[0], importer.event()[0]) == ("lost", "reclaimed")
        call = OWNING[backend][place % 2]
        whose = "daemon.holder" if backend == "cuda_ipc" else str(kept.runtime_dir)
        if status == DEVICE_UNAVAILABLE and backend == "cuda_ipc":
            continue  # takes the holder with it: see above
        made = machine.process(owner_pid(kept)).calls.get(call, 0) if backend == "cuda_ipc" else 0
        machine.inject(call, status, nth=1 + made, process=whose)
        with pytest.raises(PreloadError) as refusal:
            load_on(kept, sparse_checkpoint(1, MIB), device)
        require_clear(refusal.value, call, status)
        machine.heal()
        assert importer.ask("touch") > 0
        if status != DEVICE_UNAVAILABLE:  # a lost device takes nothing back before this life ends
            assert machine.used_bytes(0) == 2 * MIB
    importer.end()
    with kept.control() as control:
        control.evict(make_selector(generation_id=loaded.id))
        listed = control.list()
    assert {(d.reserved_bytes, d.resident_bytes) for d in listed.devices} == {(0, 0)}
    assert not [p.live for p in machine.processes() if p.pid == listed.pid and p.num_live]
    wait_for(lambda: machine.used_bytes(0) == 0, "the memory to be back")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_is_made_that_no_test_here_fails(
    machine: Any, device: str, serving: Any, raw_checkpoint: Path, load_on: Any, attacher: Any, backend: str
) -> None:
    daemon = serving(backend)
    before = {p.pid: p.calls for p in machine.processes()}
    load_on(daemon, raw_checkpoint, device)
    attacher(daemon, checkpoint=raw_checkpoint, device=device)("attach")
    with daemon.control() as control:
        list(control.verify(make_selector(raw_checkpoint, recipe=Recipe(model="raw"), device=device), timeout_s=60))
    made = {name for p in machine.processes() if p.calls != before.get(p.pid) for name in p.calls}
    failed = {*loader_calls(backend), *DESCRIBING, *OWNING[backend], "cuMemcpyDtoH", "cuCtxSynchronize"}
    assert made <= failed, "cuCtxSynchronize only asks whether a device is lost, and may fail in any way"
