"""Segment backends: one module for each kind of memory a generation can live in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Segment(Protocol):
    """One allocation, held by a descriptor or a handle that can be passed on. `size_bytes` is a multiple of its
    device's granularity."""

    fd: int
    """-1 if it is passed on by its handle only."""
    size_bytes: int
    handle: bytes
    """What travels in place of the descriptor, or beside it; empty if nothing does."""

    @property
    def backend(self) -> str:
        """What a client must know to map it: see Segment in protos/weight_cache.proto."""

    @property
    def dies_with_us(self) -> bool:
        """Whether closing it takes the memory from those who still map it."""

    def seal(self) -> None:
        """Nobody may write from now on, as far as the backend can say so."""

    def close(self) -> None:
        """Lets go of the memory, which returns when nobody else holds or maps it, or at once if it dies with us.
        Idempotent."""


def descriptors(segments: Sequence[Segment]) -> list[int]:
    """Those to pass on, in order; none if the segments are passed on by their handles only."""
    return [segment.fd for segment in segments if segment.fd >= 0]


def handles(segments: Sequence[Segment]) -> list[bytes]:
    """Those that must be passed on, because there are no descriptors."""
    return [segment.handle for segment in segments if segment.fd < 0]
