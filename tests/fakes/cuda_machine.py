"""A machine with emulated GPUs: builds the driver of tests/fakes/cuda_driver, describes devices to it, injects faults
and reads what it counted. One machine is one file, which every process with `env` shares.

python tests/fakes/cuda_machine.py preload bench attach --device cuda:0
python tests/fakes/cuda_machine.py pytest tests/contract --on cuda_ipc

runs a command on a machine with one emulated GPU of 4 GiB.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "cuda_driver"
CACHE = Path(__file__).parents[2] / "build" / "cuda_driver"
GRANULARITY = 2 << 20
GIB = 1 << 30

OUT_OF_MEMORY, DEVICE_UNAVAILABLE, INVALID_HANDLE, NOT_SUPPORTED = 2, 46, 400, 801
HAS_VMM, HAS_FD, IS_MIG, HAS_IPC, HAS_FABRIC = 1, 2, 4, 8, 16

_MAGIC = 0x46435544
_DEVICES_AT, _FAULTS_AT, _PROCESSES_AT = 4096, 8192, 16384
_DEVICE = struct.Struct("<64s16sQ3I4xQ144x")
_FAULT = struct.Struct("<48s64sIiII")
_LIVE = ("handles", "mappings", "reservations", "contexts", "allocations", "imports", "pinned", "streams")
_MAX_FAULTS, _MAX_PROCESSES, _MAX_CALLS = 32, 1024, 88
_PROCESS = struct.Struct(f"<IIQ{len(_LIVE)}I112s{_MAX_CALLS}I")
_FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]


def build_library() -> Path:
    """The folder with libcuda.so.1, compiled by the system's compiler unless this very source was before."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = CACHE / digest
    if not (folder / "libcuda.so.1").exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".{os.getpid()}.so"
        inputs = [str(source) for source in sources if source.suffix == ".c"]
        words = ["cc", *_FLAGS, "-Wl,-soname,libcuda.so.1", "-o", str(made), *inputs, "-ldl"]
        subprocess.run(words, check=True, capture_output=True, text=True)
        made.rename(folder / "libcuda.so.1")
    return folder


@dataclass(frozen=True)
class Gpu:
    """One device. `uuid`: 16 bytes; random if not given."""

    total_bytes: int = GIB
    uuid: bytes = b""
    flags: int = HAS_VMM | HAS_FD | HAS_IPC
    name: str = "Preload emulated device"
    context_bytes: int = 0
    """What a context takes of its memory."""


@dataclass(frozen=True)
class Process:
    """What the driver counted in one process: calls by name, and what it has at this moment."""

    pid: int
    command: str
    live: dict[str, int]
    calls: dict[str, int]

    @property
    def num_live(self) -> int:
        return sum(self.live.values())

    @property
    def is_alive(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"


class Machine:
    """Owns the shared file. `env` is what a process needs to find the driver and this machine."""

    def __init__(self, folder: Path, gpus: list[Gpu]) -> None:
        self.library = build_library()
        self.path = folder / "cuda-machine"
        self.id = os.urandom(7).hex()
        self.uuids = [gpu.uuid or os.urandom(16) for gpu in gpus]
        self.gpus = gpus
        with self.path.open("wb") as file:
            file.truncate(_PROCESSES_AT + _MAX_PROCESSES * _PROCESS.size)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        for index, (gpu, uuid) in enumerate(zip(gpus, self.uuids, strict=True)):
            row = (gpu.name.encode(), uuid, gpu.total_bytes, gpu.flags, 9, 0, gpu.context_bytes)
            _DEVICE.pack_into(self._map, _DEVICES_AT + index * _DEVICE.size, *row)
        struct.pack_into("<II16s", self._map, 0, _MAGIC, len(gpus), self.id.encode())
        self._names = _call_names()

    @property
    def env(self) -> dict[str, str]:
        path = f"{self.library}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        return {"LD_LIBRARY_PATH": path, "FAKE_CUDA_STATE": str(self.path)}

    def device(self, index: int = 0) -> str:
        """The name by which everybody knows a device."""
        text = self.uuids[index].hex()
        return "cuda:GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def inject(self, call: str, error: int, nth: int = 1, process: str = "") -> None:
        """From now on the n-th call of that name by a process fails; 0: every one. `process`: a part of its command
        line."""
        assert call in self._names, f"the emulated driver has no {call}"
        for place in range(_FAULTS_AT, _FAULTS_AT + _MAX_FAULTS * _FAULT.size, _FAULT.size):
            if not _FAULT.unpack_from(self._map, place)[3]:
                _FAULT.pack_into(self._map, place, call.encode(), process.encode(), nth, error, 0, 0)
                return
        raise AssertionError("too many faults")

    def num_fired(self) -> int:
        """How often an injected fault has struck."""
        places = range(_FAULTS_AT, _FAULTS_AT + _MAX_FAULTS * _FAULT.size, _FAULT.size)
        return sum(_FAULT.unpack_from(self._map, place)[4] for place in places)

    def heal(self) -> None:
        """No fault any more; a process that has lost its device stays without."""
        self._map[_FAULTS_AT : _FAULTS_AT + _MAX_FAULTS * _FAULT.size] = bytes(_MAX_FAULTS * _FAULT.size)

    def processes(self) -> list[Process]:
        """Everybody who ever called the driver, the dead included."""
        found = []
        for index in range(_MAX_PROCESSES):
            row = _PROCESS.unpack_from(self._map, _PROCESSES_AT + index * _PROCESS.size)
            if row[0]:
                live = dict(zip(_LIVE, row[3:11], strict=True))
                calls = {name: count for name, count in zip(self._names, row[12:], strict=False) if count}
                found.append(Process(row[0], row[11].split(b"\0")[0].decode(), live, calls))
        return found

    def process(self, pid: int) -> Process:
        return next(process for process in self.processes() if process.pid == pid)

    def take_all_but(self, left_bytes: int, index: int = 0) -> int:
        """Takes memory of a device, as another program would; it is back when the descriptor is closed."""
        size = self.gpus[index].total_bytes - self.used_bytes(index) - left_bytes
        fd = os.memfd_create(f"fakecuda:{self.id}:{index}:{size}")
        os.ftruncate(fd, size)
        return fd

    def used_bytes(self, index: int = 0) -> int:
        """Memory of a device that any process on this host holds or maps."""
        sizes: dict[int, int] = {}
        name = re.compile(rf"/memfd:fakecuda:{self.id}\w*:{index}:(\d+)")
        for inode, link in _memfds():
            if match := name.match(link):
                sizes[inode] = int(match[1])
        return sum(sizes.values())


def _memfds() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder / "fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(entry.path)
                    if link.startswith("/memfd:fakecuda:"):
                        yield os.stat(entry.path).st_ino, link
        with contextlib.suppress(OSError):
            for line in (folder / "maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/memfd:fakecuda:"):
                    yield int(fields[4]), fields[5]


def _call_names() -> list[str]:
    """In the order of the rows' counters: that of the X-macro in fake.h."""
    text = (SOURCES / "fake.h").read_text().partition("#define CALLS(X)")[2].partition("#define AS_ENUM")[0]
    return re.findall(r"X\((\w+)\)", text)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="cuda-machine-") as folder:
        machine = Machine(Path(folder), [Gpu(4 * GIB)])
        os.chmod(folder, 0o755)  # as a real device is everybody's
        machine.path.chmod(0o666)
        env = {**os.environ, **machine.env, "FAKE_CUDA_DEVICE": machine.device()}
        return subprocess.run(sys.argv[1:], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
