"""The emulated driver itself: it must be as strict as the real one where our code could be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

PRELUDE = """
import ctypes, os, signal, sys, time
from cuda.bindings import driver as cu
def call(name, *arguments):
    status, *values = getattr(cu, name)(*arguments)
    return (status.name.removeprefix("CUDA_"), *values)
def ok(name, *arguments):
    status, *values = call(name, *arguments)
    assert status == "SUCCESS", (name, status)
    return values[0] if values else None
MIB = 1 << 20
def properties(device=0):
    p = cu.CUmemAllocationProp()
    p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.location.id = device
    p.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return p
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
def access(flags):
    a = cu.CUmemAccessDesc()
    a.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    a.location.id = 0
    a.flags = flags
    return [a]
READ = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
WRITE = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
def mapped(handle, size, flags):
    at = ok("cuMemAddressReserve", size, 0, 0, 0)
    ok("cuMemMap", at, size, 0, handle, 0)
    ok("cuMemSetAccess", at, size, access(flags), 1)
    return int(at)
def context():
    ok("cuCtxSetCurrent", ok("cuDevicePrimaryCtxRetain", ok("cuDeviceGet", 0)))
"""


@pytest.fixture
def python(machine: Any) -> Any:
    """Runs a script on the machine; what it printed."""

    def run(script: str, returncode: int = 0) -> str:
        done = subprocess.run([sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=60)
        assert done.returncode == returncode, done.stderr
        return done.stdout

    return run


def test_nothing_works_before_cuinit_or_in_a_forked_child(python: Any) -> None:
    said = python("""
print(call("cuDeviceGetCount")[0])
ok("cuInit", 0)
print(call("cuDeviceGetCount"))
if os.fork() == 0:
    print(call("cuDeviceGetCount")[0], flush=True)
    os._exit(0)
os.wait()
""")
    assert said.split("\n")[:3] == ["ERROR_NOT_INITIALIZED", "('SUCCESS', 2)", "ERROR_NOT_INITIALIZED"]


def test_memory_lives_while_a_handle_a_descriptor_or_a_mapping_does(python: Any, machine: Any) -> None:
    said = python("""
ok("cuInit", 0)
context()
def free(): return call("cuMemGetInfo")[1] // MIB
before = free()
handle = ok("cuMemCreate", 4 * MIB, properties(), 0)
fd = int(ok("cuMemExportToShareableHandle", handle, FD, 0))
ok("cuMemRelease", handle)
print(before - free())
other = ok("cuMemImportFromShareableHandle", fd, FD)
os.close(fd)
print(before - free())
at = mapped(other, 4 * MIB, WRITE)
ok("cuMemRelease", other)
print(before - free())
ok("cuMemUnmap", at, 4 * MIB)
ok("cuMemAddressFree", at, 4 * MIB)
print(before - free())
""")
    assert said.split() == ["4", "4", "4", "0"]
    assert machine.used_bytes(0) == 0


def test_sizes_capacity_and_bad_arguments_are_checked(python: Any) -> None:
    said = python("""
ok("cuInit", 0)
print(call("cuMemCreate", 4096, properties(), 0)[0])
print(call("cuMemCreate", 256 * MIB, properties(), 0)[0])
handle = ok("cuMemCreate", 2 * MIB, properties(), 0)
at = ok("cuMemAddressReserve", 4 * MIB, 0, 0, 0)
print(call("cuMemMap", at, 4 * MIB, 0, handle, 0)[0])
ok("cuMemMap", at, 2 * MIB, 0, handle, 0)
print(call("cuMemMap", at, 2 * MIB, 0, handle, 0)[0])
print(call("cuMemSetAccess", at, 2 * MIB, access(READ), 1)[0])
context()
print(call("cuMemSetAccess", at, 4 * MIB, access(READ), 1)[0])
print(call("cuMemAddressFree", at, 4 * MIB)[0])
print(call("cuMemcpyHtoD", at, b"x" * 8, 8)[0])
ok("cuMemSetAccess", at, 2 * MIB, access(READ), 1)
print(call("cuMemcpyHtoD", at, b"x" * 8, 8)[0])
print(call("cuMemImportFromShareableHandle", 0, FD)[0])
""")
    assert said.split() == [
        "ERROR_INVALID_VALUE", "ERROR_OUT_OF_MEMORY", "ERROR_INVALID_VALUE", "ERROR_ALREADY_MAPPED",
        "ERROR_INVALID_CONTEXT", "ERROR_INVALID_VALUE", "ERROR_INVALID_VALUE", "ERROR_INVALID_VALUE",
        "ERROR_INVALID_VALUE", "ERROR_INVALID_VALUE",
    ]  # fmt: skip


def test_a_store_to_a_read_only_mapping_kills_the_process(python: Any) -> None:
    script = """
ok("cuInit", 0)
context()
at = mapped(ok("cuMemCreate", 2 * MIB, properties(), 0), 2 * MIB, FLAGS)
ctypes.memset(at, 1, 1)
"""
    python(script.replace("FLAGS", "WRITE"))
    python(script.replace("FLAGS", "READ"), returncode=-11)


def test_a_copy_from_pinned_memory_happens_when_it_is_waited_for(python: Any) -> None:
    said = python("""
ok("cuInit", 0)
context()
at = mapped(ok("cuMemCreate", 2 * MIB, properties(), 0), 2 * MIB, WRITE)
pinned = int(ok("cuMemHostAlloc", 4096, 0))
stream = ok("cuStreamCreate", 0)
ctypes.memset(pinned, 1, 8)
ok("cuMemcpyHtoDAsync", at, pinned, 8, stream)
ctypes.memset(pinned, 2, 8)
ok("cuStreamSynchronize", stream)
back = bytearray(8)
ok("cuMemcpyDtoH", back, at, 8)
print(back[0])
""")
    assert said.split() == ["2"], "a buffer that is filled again too early spoils the copy"


def test_ipc_memory_dies_with_its_exporter(python: Any, machine: Any) -> None:
    said = python(
        """
ok("cuInit", 0)
context()
at = ok("cuMemAlloc", 4096)
ok("cuMemsetD8", at, 7, 4096)
handle = ok("cuIpcGetMemHandle", at)
print(call("cuIpcOpenMemHandle", handle, 1)[0], flush=True)
import subprocess
text = ctypes.string_at(int(handle.getPtr()), 64).hex()
child = subprocess.Popen([sys.executable, "-c", IMPORTER_SOURCE, text, str(os.getpid())],
                         stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""".replace("IMPORTER_SOURCE", repr(PRELUDE + IMPORTER)),
        returncode=-9,
    )
    assert said.split() == ["ERROR_INVALID_CONTEXT", "7"]


IMPORTER = """
ok("cuInit", 0)
context()
handle = cu.CUipcMemHandle()
ctypes.memmove(int(handle.getPtr()), bytes.fromhex(sys.argv[1]), 64)
at = int(ok("cuIpcOpenMemHandle", handle, 1))
print(ctypes.c_ubyte.from_address(at).value, flush=True)
end = time.monotonic() + 30
while os.path.exists("/proc/" + sys.argv[2] + "/exe") and time.monotonic() < end:
    time.sleep(0.01)
while time.monotonic() < end:  # its next access faults
    ctypes.c_ubyte.from_address(at).value
    time.sleep(0.01)
"""


def test_a_process_that_is_killed_gives_its_memory_back(python: Any, machine: Any) -> None:
    python("""
ok("cuInit", 0)
for _ in range(4):
    ok("cuMemCreate", 8 * MIB, properties(), 0)
os.kill(os.getpid(), signal.SIGKILL)
""", returncode=-9)  # fmt: skip
    assert machine.used_bytes(0) == 0
    assert os.environ["FAKE_CUDA_STATE"] == str(machine.path)
