"""Every driver call fails once, in each process that makes it: a clear error, and nothing is left behind.

What is left is counted by the driver itself: memory by who holds it, handles and mappings by process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.errors import DeviceError, NoMemoryError, PreloadError

MIB = 1 << 20
OUT_OF_MEMORY, DEVICE_UNAVAILABLE, INVALID_HANDLE, NOT_SUPPORTED = 2, 46, 400, 801
NAMES = {OUT_OF_MEMORY: "OUT_OF_MEMORY", INVALID_HANDLE: "INVALID_HANDLE", NOT_SUPPORTED: "NOT_SUPPORTED",
         DEVICE_UNAVAILABLE: "DEVICE_UNAVAILABLE"}  # fmt: skip

FINDING = ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid"]
MAPPING = ["cuDeviceGetName", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAddressReserve",
           "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"]  # fmt: skip
COPYING = ["cuStreamCreate", "cuMemHostAlloc", "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord",
           "cuEventSynchronize", "cuStreamSynchronize"]  # fmt: skip
LETTING_GO = ["cuMemRelease", "cuStreamDestroy", "cuEventDestroy", "cuMemFreeHost", "cuMemUnmap",
              "cuMemAddressFree", "cuDevicePrimaryCtxRelease"]  # fmt: skip
ERRORS = (OUT_OF_MEMORY, INVALID_HANDLE, NOT_SUPPORTED, DEVICE_UNAVAILABLE)


def require_clear(error: PreloadError, call: str, status: int) -> None:
    """The message names the call and what the driver said of it."""
    wanted = NoMemoryError if status == OUT_OF_MEMORY else DeviceError
    assert type(error) is wanted
    assert call in error.message
    assert NAMES[status] in error.message


def test_whatever_fails_in_a_loader_fails_its_load_and_nothing_else(
    machine: Any, daemon: Any, device: str, sparse_checkpoint: Any, load_on: Any, wait_for: Any
) -> None:
    path = sparse_checkpoint(1, 5 * MIB)
    for place, call in enumerate([*FINDING, *MAPPING, *COPYING, *LETTING_GO]):
        status = ERRORS[place % len(ERRORS)]
        machine.inject(call, status, process="loading.loader")
        with pytest.raises(PreloadError) as refusal:
            load_on(daemon, path, device)
        require_clear(refusal.value, call, status)
        machine.heal()
        wait_for(lambda: machine.used_bytes(0) == 0, f"the memory to be back after {call} failed")
        with daemon.control() as control:
            assert {(d.reserved_bytes, d.resident_bytes) for d in control.list().devices} == {(0, 0)}
    load_on(daemon, path, device)
    assert machine.process(daemon.pid).num_live == 0


def test_whatever_fails_in_the_daemon_fails_its_load_and_the_next_one_succeeds(
    machine: Any, device: str, make_daemon: Callable[..., Any], raw_checkpoint: Path, load_on: Any, wait_for: Any
) -> None:
    daemon = make_daemon()
    describing = ["cuDeviceGetAttribute", "cuDeviceTotalMem", "cuMemGetAllocationGranularity"]
    allocating = ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease"]
    for place, call in enumerate([*FINDING, *describing, *allocating]):
        status = ERRORS[place % 3]  # a lost device stays lost for the process: see below
        calls = [p.calls for p in machine.processes() if p.pid == daemon.pid]
        machine.inject(call, status, nth=1 + (calls[0].get(call, 0) if calls else 0), process=str(daemon.runtime_dir))
        with pytest.raises(PreloadError) as refusal:
            load_on(daemon, raw_checkpoint, device)
        require_clear(refusal.value, call, status)
        machine.heal()
        with daemon.control() as control:
            assert {(d.reserved_bytes, d.resident_bytes) for d in control.list().devices} == {(0, 0)}
        if call != "cuMemRelease":
            wait_for(lambda: machine.used_bytes(0) == 0, f"the memory to be back after {call} failed")
    load_on(daemon, raw_checkpoint, device)
    assert machine.process(daemon.pid).num_live == 0, "a handle that was not released is tried again"
    assert machine.used_bytes(0) == 2 * MIB


def test_a_daemon_that_loses_the_device_serves_what_is_resident(
    machine: Any, device: str, make_daemon: Any, raw_checkpoint: Path, sparse_checkpoint: Any, load_on: Any, hold: Any
) -> None:
    daemon = make_daemon()
    load_on(daemon, raw_checkpoint, device)
    created = machine.process(daemon.pid).calls["cuMemCreate"]
    machine.inject("cuMemCreate", DEVICE_UNAVAILABLE, nth=created + 1, process=str(daemon.runtime_dir))
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"CUDA_ERROR_DEVICE_UNAVAILABLE; a restart of the daemon"):
            load_on(daemon, sparse_checkpoint(1, 1000), device)
    assert hold(daemon, raw_checkpoint, recipe={"model": "raw"}, device=device).ask("touch") > 0
    load_on(daemon, sparse_checkpoint(1, 1000, "other"), "host")


def test_whatever_fails_in_an_attach_fails_it_and_the_next_one_succeeds(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any, attacher: Any
) -> None:
    load_on(daemon, raw_checkpoint, device)
    ask = attacher(daemon, checkpoint=raw_checkpoint, device=device)
    first, pid = ask("attach"), ask("pid")["pid"]
    num_fds = []
    for place, call in enumerate([*FINDING, *MAPPING]):
        status = ERRORS[place % 3]
        machine.inject(call, status, nth=1 + machine.process(pid).calls[call], process="cuda_attacher")
        said = ask("attach")
        assert said["error"] == ("NoMemoryError" if status == OUT_OF_MEMORY else "DeviceError")
        assert f"{call} failed with CUDA_ERROR_{NAMES[status]}" in said["message"]
        assert machine.process(pid).num_live == 0, f"{call} left {machine.process(pid).live}"
        num_fds.append(said["num_fds"])
        machine.heal()
        assert ask("attach") == first
    assert num_fds[-1] <= num_fds[0] + 2, f"descriptors are left: {num_fds}"
