"""Conversion on the device that weights go to: stored bytes cross once, and become resident parts there.

For each thread that reads there is a lane: two slots of pinned memory and a queue of the device. A slot's piece is
read, sent, converted, stored in its segment, and its result brought back for its digest, while the other slot's is
read. Owns the order of these and the digests; the device is behind `ConversionDevice`, whose queues do what they are
told in order, some time before `Ticket.wait` returns. Invariants: a slot is not touched between its submission and
the end of its wait; nothing is under way when a run has ended, be it with an error; transient memory is bounded by
threads × two pieces, whatever the size of the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from preload.engine.errors import PreloadError

from .convert import magnitude_of, not_finite, parts_of
from .plan import Place
from .resident_parts import NEED_AMAX
from .steps import Step

Work = Callable[[Tensor], tuple[list[Tensor], Tensor]]
"""Stored bytes on the device, uint8[num_bytes] → results there, uint8[n] each, and bool[]: whether they are good."""

Put = Callable[[int, int], int]
"""(number of a result, its bytes) → the address on the device where it belongs. Called for results in order."""


class Ticket(Protocol):
    def wait(self) -> tuple[list[int], bool]:
        """Until a submission is done: the bytes of each result, and whether they are good. Raises DeviceError,
        NoMemoryError."""


class Queue(Protocol):
    """Work in order, of one thread."""

    def submit(self, stored: Tensor, work: Work, put: Put | None, out: Tensor) -> Ticket:
        """Sends `stored`, does `work`, stores what `put` has an address for, and brings all results back, side by
        side, into `out`. Both are pinned: uint8[n]. Raises DeviceError, NoMemoryError, when nothing of it is under
        way any more."""


class ConversionDevice(Protocol):
    """Every method raises DeviceError, NoMemoryError."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host that the device can copy from and to: uint8[num_bytes]."""

    def queue(self) -> Queue:
        """A new one, for the calling thread."""

    def release(self) -> str:
        """Gives back all transient memory; how much that was at most, in words."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a stored tensor, that of `part`."""

    part: Step
    start: int
    num_bytes: int
    num_rows: int
    out_bytes: int
    """Not less than what becomes of them."""
    is_first: bool
    """Whether the weight begins with them."""


@dataclass
class _Slot:
    stored: Tensor
    out: Tensor
    ticket: Ticket | None = None


class _Lane:
    """One thread's."""

    def __init__(self, device: ConversionDevice) -> None:
        self._device = device
        self._queue = device.queue()
        self._slots = [_Slot(device.pinned(0), device.pinned(0)) for _ in range(2)]

    def run(
        self,
        pieces: Sequence[Piece],
        read: Callable[[Piece, memoryview], bool],
        work: Callable[[Piece], Work],
        put: Put | None,
        take: Callable[[list[memoryview], bool], None],
    ) -> None:
        """Takes pieces one after the other: `read` fills a buffer, and says whether to go on; `take` gets results in
        the same order."""
        try:
            for number, piece in enumerate(pieces):
                slot = self._slots[number % 2]
                self._finish(slot, take)
                stored = self._stored(slot, piece)
                if not read(piece, _view(stored)):
                    break
                slot.ticket = self._queue.submit(stored, work(piece), put, slot.out)
            for number in range(len(pieces), len(pieces) + 2):
                self._finish(self._slots[number % 2], take)
        finally:
            # After an error the other slot's work may be under way, into a segment that is unmapped next.
            for slot in self._slots:
                ticket, slot.ticket = slot.ticket, None
                if ticket is not None:
                    with suppress(PreloadError):  # the first error is told
                        ticket.wait()

    def _stored(self, slot: _Slot, piece: Piece) -> Tensor:
        """The slot's place for a piece, and enough of one for its results and the word on them."""
        if slot.stored.numel() < piece.num_bytes:
            slot.stored = self._device.pinned(piece.num_bytes)
        if slot.out.numel() <= piece.out_bytes:
            slot.out = self._device.pinned(piece.out_bytes + 1)
        return slot.stored[: piece.num_bytes]

    @staticmethod
    def _finish(slot: _Slot, take: Callable[[list[memoryview], bool], None]) -> None:
        if slot.ticket is None:
            return
        ticket, slot.ticket = slot.ticket, None
        sizes, is_good = ticket.wait()
        parts: Sequence[Tensor] = torch.split(slot.out[: sum(sizes)], sizes)
        take([_view(part) for part in parts], is_good)


class DeviceConversion:
    """For the threads of a Filler. `address`: of (segment, offset) on the device."""

    def __init__(self, device: ConversionDevice, address: Callable[[int, int], int]) -> None:
        self.device = device
        self._address = address
        self._local = threading.local()

    def convert(
        self,
        step: Step,
        places: Sequence[Place],
        pieces: Sequence[Piece],
        read: Callable[[Piece, memoryview], bool],
    ) -> tuple[dict[str, bytes], list[bytes]] | None:
        """Digests of what was read by stored name, and of each target's resident bytes. None if `read` said to stop.

        Raises CheckpointError for a value that cannot be quantized, DeviceError, NoMemoryError."""
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = _Lane(self.device)
        amax = self._amax(lane, step, pieces, read) if step.layout in NEED_AMAX else 0.0
        sources = {source.name: blake3() for source in step.sources}
        hashers, offsets = [blake3() for _ in places], [0] * len(places)
        was_stopped = False

        def read_and_hash(piece: Piece, into: memoryview) -> bool:
            nonlocal was_stopped
            was_stopped = not read(piece, into)
            sources[piece.part.source.name].update(into)
            return not was_stopped

        def work(piece: Piece) -> Work:
            return lambda stored: parts_of(piece.part, stored, piece.num_rows, amax, is_first=piece.is_first)

        def put(index: int, num_bytes: int) -> int:
            place = places[index]
            address = self._address(place.segment, place.offset + offsets[index])
            offsets[index] += num_bytes
            return address

        def take(parts: list[memoryview], is_good: bool) -> None:
            if not is_good:
                raise not_finite(step)
            for hasher, part in zip(hashers, parts, strict=True):
                hasher.update(part)

        lane.run(pieces, read_and_hash, work, put, take)
        if was_stopped:
            return None
        return {name: hasher.digest() for name, hasher in sources.items()}, [hasher.digest() for hasher in hashers]

    def _amax(
        self, lane: _Lane, step: Step, pieces: Sequence[Piece], read: Callable[[Piece, memoryview], bool]
    ) -> float:
        """The largest magnitude of the weight, by a reading of its own, whose bytes do not count as progress."""
        found = [0.0]

        def work(piece: Piece) -> Work:
            def magnitude(stored: Tensor) -> tuple[list[Tensor], Tensor]:
                largest, are_finite = magnitude_of(piece.part, stored, piece.num_rows)
                return [largest.reshape(1).view(torch.uint8)], are_finite

            return magnitude

        def take(parts: list[memoryview], is_good: bool) -> None:
            if not is_good:
                raise not_finite(step)
            found.append(parts[0].cast("f")[0])

        lane.run(pieces, read, work, None, take)
        return max(found)


def _view(tensor: Tensor) -> memoryview:
    view: Any = tensor.numpy()
    return memoryview(view).cast("B")
