"""Memory of a GPU that a holder process has allocated, passed on as a 64-byte IPC handle.

For hosts whose driver exports no descriptors, and for engines that cannot reach the hand-over socket. The memory is
the holder's: it lives until the holder frees it or ends, whoever maps it, and everybody who opens the handle can
write. So a segment is freed with the last lease on it, and never under one.
"""

from __future__ import annotations

from collections.abc import Callable


class CudaIpcSegment:
    """One block of a holder. `free` gives it back, in a thread; after the holder's end it does nothing."""

    backend = "cuda_ipc"
    dies_with_us = True
    fd = -1

    def __init__(self, block_id: int, size_bytes: int, handle: bytes, holder_id: str, free: Callable[[int], None]):
        self.block_id = block_id
        self.size_bytes = size_bytes
        self.handle = handle
        self.holder_id = holder_id
        self._free: Callable[[int], None] | None = free

    def seal(self) -> None:
        """There are no seals: `preload verify` finds out what somebody wrote."""

    def close(self) -> None:
        if self._free is not None:
            free, self._free = self._free, None
            free(self.block_id)
