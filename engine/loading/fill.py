"""Carries a checkpoint's bytes to their places, hashing on the way.

Each thread takes one tensor at a time and moves it in pieces through a small scratch of its own: read, hash while
in cache, convert if the recipe says so, write. Writing through the descriptor beats writing through a mapping: the
kernel need not clear the pages first, nor fault them in one by one. Invariant: private memory is bounded by threads
× piece, whatever the size of the checkpoint; but for packed weights (packed.py), which are converted whole, one at a
time. A layout whose scale takes the whole weight has it read twice. Reading and hashing release the interpreter's
lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blake3 import blake3

from preload.engine.models.llama_names import stored_row

from .files import TensorInfo
from .plan import Plan
from .resident_parts import NEED_AMAX, PIECE_ROWS
from .steps import Resolved, Step

if TYPE_CHECKING:
    from .device_conversion import DeviceConversion, Piece

PIECE_BYTES = 1 << 20
"""Bytes that a thread moves at a time: small enough to stay in its cache, large enough for the disk."""

CONVERTED_VALUES = 1 << 20
"""Values that a thread converts at a time: 4 MiB as float32, and a few times that within the conversion."""

PROGRESS_SECONDS = 0.05

Write = Callable[[int, int, memoryview], None]
"""Writes bytes to (segment, offset)."""


@dataclass
class Filled:
    """Digests of what was read, by stored name, and of what is resident, by resident name."""

    source_digests: dict[str, bytes] = field(default_factory=dict)
    resident_digests: dict[str, bytes] = field(default_factory=dict)


class Filler:
    """One pass over a checkpoint. Without a plan it only hashes."""

    def __init__(
        self, resolved: Resolved, plan: Plan | None, write: Write | None, conversion: DeviceConversion | None = None
    ) -> None:
        """`conversion`: what converts elsewhere than on the host; packed weights come as a whole and stay here."""
        self._conversion = conversion
        self._resolved = resolved
        self._plan = plan
        self._write = write
        self._filled = Filled()
        self._lock = threading.Lock()
        self._whole = threading.Lock()
        self._done_bytes = 0
        self._stopped = False
        self._scratch = threading.local()

    def run(self, num_threads: int, progress: Callable[[int], None]) -> Filled:
        """Processes every step; `progress(done_bytes)` is called by this thread about 20 times a second.

        Raises the first error of any step, after the other threads have stopped.
        """
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="fill")
        try:
            futures: set[Future[None]] = {pool.submit(self._guarded, step) for step in self._resolved.steps}
            while futures:
                done, futures = wait(futures, PROGRESS_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                progress(self._done_bytes)
        finally:
            self._stopped = True
            pool.shutdown(cancel_futures=True)
        return self._filled

    def _guarded(self, step: Step) -> None:
        """An error stops the other threads at their next piece, not only when the caller hears of it."""
        try:
            self._process(step)
        except BaseException:
            self._stopped = True
            raise

    def _process(self, step: Step) -> None:
        if step.packing is not None:
            self._process_packed(step)
            return
        if self._conversion is not None and step.converts:
            self._process_elsewhere(step, self._conversion)
            return
        hashers = [blake3() for _ in step.targets]
        offsets = [0] * len(step.targets)
        is_other = step.converts or step.permuted_head_dim > 0 or bool(step.others)
        hashes_targets = self._plan is not None and is_other
        needs_amax = self._plan is not None and step.converts and step.layout in NEED_AMAX
        amax = max(self._amax(part) for part in step.parts) if needs_amax else 0.0
        for number, part in enumerate(step.parts):
            source = blake3()
            for stored, outputs in self._pieces(part, amax, number == 0):
                if self._stopped:
                    return
                source.update(stored)
                for index, data in enumerate(outputs()):
                    if hashes_targets:
                        hashers[index].update(data)
                    self._put(step, index, offsets[index], data)
                    offsets[index] += len(data)
                with self._lock:
                    self._done_bytes += len(stored)
            self._filled.source_digests[part.source.name] = source.digest()
        for target, hasher in zip(step.targets, hashers, strict=True):
            as_read = self._filled.source_digests[step.source.name]
            self._filled.resident_digests[target.name] = hasher.digest() if hashes_targets else as_read

    def _process_elsewhere(self, step: Step, conversion: DeviceConversion) -> None:
        assert self._plan is not None
        from .device_conversion import Piece  # torch

        total = sum(target.num_bytes for target in step.targets)
        total_rows = sum(part.num_rows for part in step.parts)
        # A piece's share, and one entry more of each target: of scales for many rows the last may be for fewer.
        spare = sum(target.num_bytes // max(1, target.shape[0]) for target in step.targets)
        pieces: list[Piece] = []
        for part in step.parts:
            num_row_bytes, at_once = row_bytes(part), rows_per_piece(part)
            for row in range(0, part.num_rows, at_once):
                count = min(at_once, part.num_rows - row)
                out_bytes = total * count // total_rows + spare
                pieces.append(Piece(part, row * num_row_bytes, count * num_row_bytes, count, out_bytes, not pieces))
        num_passes = 2 if step.layout in NEED_AMAX else 1
        done_before = len(pieces) * (num_passes - 1)

        def read(piece: Piece, into: memoryview) -> bool:
            nonlocal done_before
            if self._stopped:
                return False
            source = piece.part.source
            source.file.read_into(into, source.offset + piece.start)
            if done_before:
                done_before -= 1
                return True
            with self._lock:
                self._done_bytes += piece.num_bytes
            return True

        places = [self._plan.places[target.name] for target in step.targets]
        found = conversion.convert(step, places, pieces, read)
        if found is not None:
            self._filled.source_digests.update(found[0])
            for target, digest in zip(step.targets, found[1], strict=True):
                self._filled.resident_digests[target.name] = digest

    def _process_packed(self, step: Step) -> None:
        """Weights that are stored as several tensors: hashed as they are read, converted whole."""
        if self._plan is None:
            for source in step.sources:
                self._read_whole(source, None)
            return
        with self._whole:
            stored = [bytearray(source.num_bytes) for source in step.sources]
            for source, buffer in zip(step.sources, stored, strict=True):
                self._read_whole(source, memoryview(buffer))
            if self._stopped:
                return
            from .convert import convert_packed  # torch

            for index, data in enumerate(convert_packed(step, [memoryview(buffer) for buffer in stored])):
                self._put(step, index, 0, data)
                self._filled.resident_digests[step.targets[index].name] = blake3(data).digest()

    def _read_whole(self, source: TensorInfo, into: memoryview | None) -> None:
        """Reads and hashes a stored tensor, and keeps its bytes if there is a place for them."""
        hasher = blake3()
        for start in range(0, source.num_bytes, PIECE_BYTES):
            if self._stopped:
                return
            num_bytes = min(PIECE_BYTES, source.num_bytes - start)
            piece = self._buffer(num_bytes) if into is None else into[start : start + num_bytes]
            source.file.read_into(piece, source.offset + start)
            hasher.update(piece)
            with self._lock:
                self._done_bytes += num_bytes
        self._filled.source_digests[source.name] = hasher.digest()

    def _amax(self, step: Step) -> float:
        """The largest magnitude of a weight, by a reading of its own."""
        from .convert import largest  # torch

        found, num_row_bytes = 0.0, row_bytes(step)
        piece_bytes = rows_per_piece(step) * num_row_bytes or PIECE_BYTES
        for start in range(0, step.source.num_bytes, piece_bytes):
            if self._stopped:
                break
            stored = self._buffer(min(piece_bytes, step.source.num_bytes - start))
            step.source.file.read_into(stored, step.source.offset + start)
            found = max(found, largest(step, stored, len(stored) // num_row_bytes))
        return found

    def _put(self, step: Step, index: int, offset: int, data: memoryview) -> None:
        assert self._plan is not None
        assert self._write is not None
        place = self._plan.places[step.targets[index].name]
        self._write(place.segment, place.offset + offset, data)

    def _pieces(
        self, step: Step, amax: float, is_first: bool
    ) -> Iterator[tuple[memoryview, Callable[[], list[memoryview]]]]:
        """Stored bytes piece by piece, each with the function that makes its resident bytes of it. `is_first`:
        whether the weight begins with these."""
        num_bytes, file = step.source.num_bytes, step.source.file
        writes = self._plan is not None and bool(step.targets)
        num_rows = rows_per_piece(step) if writes and (step.converts or step.permuted_head_dim) else 0
        num_row_bytes = row_bytes(step)
        piece_bytes = num_rows * num_row_bytes or PIECE_BYTES
        for start in range(0, num_bytes, piece_bytes):
            stored = self._buffer(min(piece_bytes, num_bytes - start))
            file.read_into(stored, step.source.offset + start)
            if not writes:
                yield stored, list
            elif step.converts:
                yield stored, _converter(step, stored, len(stored) // num_row_bytes, amax, is_first and start == 0)
            elif step.permuted_head_dim:
                yield stored, _permuter(step, stored, num_row_bytes)
            else:
                yield stored, lambda stored=stored: [stored]  # type: ignore[misc]

    def _buffer(self, num_bytes: int) -> memoryview:
        """This thread's scratch, at least that large."""
        buffer: bytearray | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._scratch.buffer = bytearray(max(num_bytes, PIECE_BYTES))
        return memoryview(buffer)[:num_bytes]


def row_bytes(step: Step) -> int:
    """Of the stored tensor."""
    return step.source.num_bytes // step.num_rows if step.num_rows else 0


def rows_per_piece(step: Step) -> int:
    """Rows to convert at a time: whole heads if they are permuted, whole blocks of the layout, at least one."""
    num_values = 1
    for size in step.source.shape[1:]:
        num_values *= size
    unit = math.lcm(step.permuted_head_dim or 1, PIECE_ROWS.get(step.layout, 1) if step.converts else 1)
    return max(1, CONVERTED_VALUES // max(1, num_values * unit)) * unit


def _converter(
    step: Step, stored: memoryview, num_rows: int, amax: float, is_first: bool
) -> Callable[[], list[memoryview]]:
    from .convert import convert_rows  # torch: only when a recipe converts

    return lambda: convert_rows(step, stored, num_rows, amax, is_first=is_first)


def _permuter(step: Step, stored: memoryview, num_row_bytes: int) -> Callable[[], list[memoryview]]:
    """Moves whole rows: quantized blocks do not reach across rows, so none is decoded."""

    def permute() -> list[memoryview]:
        result = bytearray(len(stored))
        for row in range(len(stored) // num_row_bytes):
            start = stored_row(row, step.permuted_head_dim) * num_row_bytes
            result[row * num_row_bytes : (row + 1) * num_row_bytes] = stored[start : start + num_row_bytes]
        return [memoryview(result)]

    return permute
