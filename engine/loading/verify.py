"""Re-hashes what is resident and names what no longer equals its manifest.

Maps segments read-only and keeps nothing: the daemon itself maps no weights, so this runs in a loader process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from blake3 import blake3

from preload.engine.errors import RequestError
from preload.protos import loader_pb2, weight_cache_pb2

from .fill import PROGRESS_SECONDS

MAX_NAMED = 20
_PIECE_BYTES = 4 << 20


def read_manifest(fd: int) -> weight_cache_pb2.Manifest:
    return weight_cache_pb2.Manifest.FromString(os.pread(fd, os.fstat(fd).st_size, 0))


def verify(
    manifest: weight_cache_pb2.Manifest, fds: Sequence[int], num_threads: int, progress: Callable[[int, int], None]
) -> loader_pb2.VerifyResult:
    """Hashes every tensor that owns memory. `progress(done_bytes, total_bytes)`.

    Raises RequestError if segments and manifest do not belong together.
    """
    sizes = [os.fstat(fd).st_size for fd in fds]
    if sizes != list(manifest.segment_bytes):
        raise RequestError(f"segments of {sizes} bytes came with a manifest of {list(manifest.segment_bytes)}")
    views = [memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) for fd, size in zip(fds, sizes, strict=True)]
    tensors = [tensor for tensor in manifest.tensors if not tensor.alias_of]
    for tensor in tensors:
        if tensor.segment >= len(sizes) or tensor.offset + tensor.num_bytes > sizes[tensor.segment]:
            raise RequestError(f"tensor {tensor.name!r} lies outside of its segment")
    checker = _Checker(views)
    _run(checker, tensors, num_threads, progress)
    order = [tensor.name for tensor in tensors if tensor.name in checker.corrupted]
    return loader_pb2.VerifyResult(
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        corrupted=order[:MAX_NAMED],
    )


class _Checker:
    """Hashes tensors in several threads; a thread adds to these fields only."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self.corrupted: set[str] = set()
        self.done_bytes = 0

    def check(self, tensor: weight_cache_pb2.Tensor) -> None:
        hasher = blake3()
        view = self._views[tensor.segment][tensor.offset : tensor.offset + tensor.num_bytes]
        for start in range(0, tensor.num_bytes, _PIECE_BYTES):
            hasher.update(view[start : start + _PIECE_BYTES])
        if hasher.digest() != tensor.digest:
            self.corrupted.add(tensor.name)
        self.done_bytes += tensor.num_bytes


def _run(
    checker: _Checker,
    tensors: Sequence[weight_cache_pb2.Tensor],
    num_threads: int,
    progress: Callable[[int, int], None],
) -> None:
    total_bytes = sum(tensor.num_bytes for tensor in tensors)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as pool:
        futures: set[Future[None]] = {pool.submit(checker.check, tensor) for tensor in tensors}
        while futures:
            done, futures = wait(futures, PROGRESS_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            progress(min(checker.done_bytes, total_bytes), total_bytes)
