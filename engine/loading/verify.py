"""Re-hashes what is resident and names what no longer equals its manifest.

Maps segments read-only and keeps nothing: the daemon itself maps no weights, so this runs in a loader process. Device
memory is copied back piece by piece, through a small buffer of each thread.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from blake3 import blake3

from preload.engine.cuda.context import DeviceContext
from preload.engine.cuda.devices import HOST
from preload.engine.cuda.mapping import DeviceMapping, Shared
from preload.engine.errors import RequestError
from preload.protos import loader_pb2, weight_cache_pb2

from .fill import PROGRESS_SECONDS

MAX_NAMED = 20
_PIECE_BYTES = 4 << 20


def read_manifest(fd: int) -> weight_cache_pb2.Manifest:
    return weight_cache_pb2.Manifest.FromString(os.pread(fd, os.fstat(fd).st_size, 0))


Read = Callable[[int, int, int], memoryview]
"""Bytes of (segment, offset, number of bytes), good until this thread's next call."""


def verify(
    manifest: weight_cache_pb2.Manifest,
    passed: Shared,
    device: str,
    num_threads: int,
    progress: Callable[[int, int], None],
) -> loader_pb2.VerifyResult:
    """Hashes every tensor that owns memory, on the host or on a device. `progress(done_bytes, total_bytes)`.

    Raises RequestError if segments and manifest do not belong together, DeviceError if a device cannot be read.
    """
    if device in ("", HOST):
        sizes = [os.fstat(fd).st_size for fd in passed.fds]
        _require_match(sizes, manifest)
        mapped = zip(passed.fds, sizes, strict=True)
        views = [memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) for fd, size in mapped]
        return _verify(
            manifest,
            lambda segment, offset, num_bytes: views[segment][offset : offset + num_bytes],
            num_threads,
            progress,
        )
    _require_match(list(manifest.segment_bytes)[: len(passed.fds) + len(passed.handles)], manifest)
    with DeviceContext(device) as context:
        mapping = DeviceMapping(context, passed, writable=False)
        result = _verify(manifest, _DeviceReader(context, mapping).read, num_threads, progress)
        mapping.close()
    return result


def _require_match(sizes: list[int], manifest: weight_cache_pb2.Manifest) -> None:
    if sizes != list(manifest.segment_bytes):
        raise RequestError(f"segments of {sizes} bytes came with a manifest of {list(manifest.segment_bytes)}")


class _DeviceReader:
    """Copies from device memory into a buffer of the calling thread."""

    def __init__(self, context: DeviceContext, mapping: DeviceMapping) -> None:
        self._context = context
        self._addresses = mapping.addresses
        self._local = threading.local()

    def read(self, segment: int, offset: int, num_bytes: int) -> memoryview:
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None:
            self._context.make_current()
            buffer = self._local.buffer = bytearray(_PIECE_BYTES)
        view = memoryview(buffer)[:num_bytes]
        self._context.driver.call("cuMemcpyDtoH", view, self._addresses[segment] + offset, num_bytes)
        return view


def _verify(
    manifest: weight_cache_pb2.Manifest, read: Read, num_threads: int, progress: Callable[[int, int], None]
) -> loader_pb2.VerifyResult:
    sizes = list(manifest.segment_bytes)
    tensors = [tensor for tensor in manifest.tensors if not tensor.alias_of]
    for tensor in tensors:
        if tensor.segment >= len(sizes) or tensor.offset + tensor.num_bytes > sizes[tensor.segment]:
            raise RequestError(f"tensor {tensor.name!r} lies outside of its segment")
    checker = _Checker(read)
    _run(checker, tensors, num_threads, progress)
    order = [tensor.name for tensor in tensors if tensor.name in checker.corrupted]
    return loader_pb2.VerifyResult(
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        corrupted=order[:MAX_NAMED],
    )


class _Checker:
    """Hashes tensors in several threads; a thread adds to these fields only."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.corrupted: set[str] = set()
        self.done_bytes = 0

    def check(self, tensor: weight_cache_pb2.Tensor) -> None:
        hasher = blake3()
        for start in range(0, tensor.num_bytes, _PIECE_BYTES):
            num_bytes = min(_PIECE_BYTES, tensor.num_bytes - start)
            hasher.update(self._read(tensor.segment, tensor.offset + start, num_bytes))
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
