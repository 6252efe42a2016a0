"""A holder's memory: the primary context of one GPU, and blocks of cuMemAlloc with their IPC handles.

Whoever opens a handle maps the whole allocation behind it, which the driver may share between small ones: sizes are
multiples of 2 MiB, so that each block is an allocation of its own. The exporting process cannot open its handle, and
never tries: it writes nothing and reads nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from contextlib import suppress
from dataclasses import dataclass

from .errors import BadRequestError, CacheError, NoMemoryError, TooManyError
from .segments.driver import DeviceInfo, Driver, no_room

log = logging.getLogger(__name__)

GRANULARITY_BYTES = 2 << 20
MAX_BLOCKS = 512
_HANDLE_BYTES = 64
_CALLS = (
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetUuid",
    "cuDeviceTotalMem",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemAlloc",
    "cuMemFree",
    "cuIpcGetMemHandle",
)


@dataclass(frozen=True)
class Block:
    """One allocation. `handle`: the 64 bytes with which other processes open it."""

    id: int
    size_bytes: int
    handle: bytes
    address: int


class Blocks:
    """Owns a context and the blocks in it, all in one thread. Raises DeviceError, NoMemoryError."""

    def __init__(self, device: str) -> None:
        self._driver = Driver(_CALLS, "its holder (which ends what it holds)")
        self._ids = itertools.count(1)
        self._blocks: dict[int, Block] = {}
        self._doomed: list[int] = []
        handle = self._driver.find(device)
        self.info = DeviceInfo(device, int(self._driver.call("cuDeviceTotalMem", handle)), GRANULARITY_BYTES)
        context = self._driver.call("cuDevicePrimaryCtxRetain", handle)
        try:
            self._driver.call("cuCtxSetCurrent", context)
        except CacheError:
            with suppress(CacheError):  # the first error is the one to hear of
                self._driver.call("cuDevicePrimaryCtxRelease", handle)
            raise

    def all(self) -> list[Block]:
        return list(self._blocks.values())

    def allocate(self, size_bytes: int) -> Block:
        """Raises NoMemoryError, DeviceError; BadRequestError on a size that is no multiple of the granularity."""
        if not size_bytes or size_bytes % GRANULARITY_BYTES:
            raise BadRequestError(f"a block of {size_bytes} bytes is no multiple of {GRANULARITY_BYTES}")
        if len(self._blocks) >= MAX_BLOCKS:
            raise TooManyError(f"{self.info.name}: its holder has {MAX_BLOCKS} blocks; evict generations")
        self.free_doomed()
        try:
            address = int(self._driver.call("cuMemAlloc", size_bytes))
        except NoMemoryError as error:
            raise no_room(self.info.name, size_bytes, error) from error
        try:
            exported = self._driver.call("cuIpcGetMemHandle", address)
        except CacheError:
            self._doomed.append(address)
            self.free_doomed()
            raise
        handle = ctypes.string_at(int(exported.getPtr()), _HANDLE_BYTES)
        block = Block(next(self._ids), size_bytes, handle, address)
        self._blocks[block.id] = block
        return block

    def is_lost(self) -> bool:
        """Whether the context has gone with its device: nothing in it can be used again."""
        try:
            self._driver.call("cuCtxSynchronize")
        except CacheError:
            return True
        return False

    def free(self, block_id: int) -> None:
        """A block that is not there is freed already. One that the driver does not take back is tried again."""
        block = self._blocks.pop(block_id, None)
        if block is not None:
            self._doomed.append(block.address)
        self.free_doomed()

    def free_doomed(self) -> bool:
        """Once more for blocks that the driver did not take back; False if it still does not."""
        for address in list(self._doomed):
            try:
                self._driver.call("cuMemFree", address)
            except CacheError as error:
                log.warning("%s: a block is not freed yet: %s", self.info.name, error.message)
                return False
            self._doomed.remove(address)
        return True
