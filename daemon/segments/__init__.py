"""Segment backends: one module for each kind of memory a generation can live in."""

from __future__ import annotations

from typing import Protocol


class Segment(Protocol):
    """One allocation, held by a descriptor that can be handed on. `size_bytes` is a multiple of its device's
    granularity."""

    fd: int
    size_bytes: int

    @property
    def backend(self) -> str:
        """What a client must know to map it: see Segment in protos/weight_cache.proto."""

    def seal(self) -> None:
        """Nobody may write from now on, as far as the backend can say so."""

    def close(self) -> None:
        """Lets go of the descriptor; memory returns when nobody else holds or maps it. Idempotent."""
