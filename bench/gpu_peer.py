"""A process that holds memory of a GPU for others to take away: one line of JSON asks, one answers.

python -m preload.bench.gpu_peer DEVICE SOCKET_FD

create   {"bytes", "byte"}       allocates exportable memory (VMM), fills it, sends its descriptor through the socket
open     {"bytes"}               maps the memory whose descriptor comes through the socket
alloc    {"bytes", "byte"}       allocates by cuMemAlloc, fills it; answers with its IPC handle
import   {"handle"}              opens an IPC handle
attach   {"runtime_dir", …}      attaches to weights; what it reads from then on is their first segment
read     {"bytes"}               a digest of the memory's first bytes, copied back
write    {"byte"}                stores one byte into the memory, by the device
crowd    {"keep", "byte"}        takes all memory but so many bytes, fills it, and lets it go again
free                             bytes of the device that are free

An answer holds "error" with the driver's word where a call failed. Whoever asks may kill it at any time.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

from preload.engine.cuda.context import DeviceContext
from preload.engine.errors import PreloadError

_PIECE_BYTES = 256 << 20


class Peer:
    """One context; `address` is what it reads."""

    def __init__(self, device: str, channel: socket.socket) -> None:
        self._context = DeviceContext(device)
        self._call = self._context.driver.call
        self._api = self._context.driver.api
        self._channel = channel
        self._address = 0
        self._kept: list[Any] = []

    def create(self, bytes: int, byte: int) -> dict[str, Any]:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._context.device.handle)
        properties.requestedHandleTypes = self._kind
        handle = self._call("cuMemCreate", bytes, properties, 0)
        fd = int(self._call("cuMemExportToShareableHandle", handle, self._kind, 0))
        self._map(handle, bytes)
        self._call("cuMemsetD8", self._address, byte, bytes)
        self._call("cuCtxSynchronize")
        socket.send_fds(self._channel, [b"fd"], [fd])
        return self._reopen(lambda: self._call("cuMemImportFromShareableHandle", fd, self._kind))

    def open(self, bytes: int) -> dict[str, Any]:
        _, (fd,), _, _ = socket.recv_fds(self._channel, 16, 1)
        self._map(self._call("cuMemImportFromShareableHandle", fd, self._kind), bytes)
        return {}

    def alloc(self, bytes: int, byte: int) -> dict[str, Any]:
        self._address = int(self._call("cuMemAlloc", bytes))
        self._call("cuMemsetD8", self._address, byte, bytes)
        self._call("cuCtxSynchronize")
        handle = self._call("cuIpcGetMemHandle", self._address)
        text = ctypes.string_at(int(handle.getPtr()), 64).hex()
        return {"handle": text, **self._reopen(lambda: self._import(text))}

    def import_(self, handle: str) -> dict[str, Any]:
        self._address = self._import(handle)
        return {}

    def attach(self, **options: Any) -> dict[str, Any]:
        from preload.engine.client import attach
        from preload.engine.recipe import Recipe

        attachment = attach(recipe=Recipe(model="raw"), tensors="device", **options)
        self._kept.append(attachment)
        self._address = min(array.address for array in attachment.tensors.values() if array.num_bytes)
        return {"num_tensors": len(attachment.tensors)}

    def read(self, bytes: int) -> dict[str, Any]:
        buffer = bytearray(bytes)
        self._call("cuMemcpyDtoH", buffer, self._address, bytes)
        return {"digest": hashlib.sha256(buffer).hexdigest()[:16], "first": buffer[0]}

    def write(self, byte: int) -> dict[str, Any]:
        self._call("cuMemsetD8", self._address, byte, 1)
        self._call("cuCtxSynchronize")
        return {}

    def crowd(self, keep: int, byte: int) -> dict[str, Any]:
        taken = []
        while (free := self.free()["free"]) > keep + _PIECE_BYTES // 4:
            size = min(_PIECE_BYTES, free - keep)
            try:
                taken.append((self._call("cuMemAlloc", size), size))
            except PreloadError:
                break  # what is left is in pieces
            self._call("cuMemsetD8", taken[-1][0], byte, size)
        self._call("cuCtxSynchronize")
        for address, _ in taken:
            self._call("cuMemFree", address)
        return {"taken": sum(size for _, size in taken)}

    def free(self) -> dict[str, Any]:
        return {"free": int(self._call("cuMemGetInfo")[0])}

    @property
    def _kind(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _map(self, handle: Any, size: int) -> None:
        self._address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        self._call("cuMemMap", self._address, size, 0, handle, 0)
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._context.device.handle)
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", self._address, size, [access], 1)

    def _import(self, text: str) -> int:
        handle = self._api.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), bytes.fromhex(text), 64)
        flag = self._api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", handle, flag))

    @staticmethod
    def _reopen(act: Callable[[], object]) -> dict[str, Any]:
        """Whether the exporter itself may open what it exported."""
        try:
            act()
        except PreloadError as error:
            return {"reopened": error.message}
        return {"reopened": "yes"}


def main() -> int:
    device, fd = sys.argv[1], int(sys.argv[2])
    peer = Peer(device, socket.socket(fileno=fd))
    for line in sys.stdin:
        asked = json.loads(line)
        word = asked.pop("do")
        try:
            answer = getattr(peer, {"import": "import_"}.get(word, word))(**asked)
        except PreloadError as error:
            answer = {"error": error.message}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
