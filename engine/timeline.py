"""Phases of a process on the host's monotonic clock, so that those of several processes compare.

CLOCK_MONOTONIC counts from boot for every process of the host: a parent can hand the moment it spawned a
child to that child, and the first phase, "exec", is honest about the interpreter's own start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from preload.protos import weight_cache_pb2 as pb


def now_ns() -> int:
    """CLOCK_MONOTONIC in nanoseconds."""
    return time.monotonic_ns()


@dataclass(frozen=True)
class Phase:
    """One named stretch of time, in nanoseconds of CLOCK_MONOTONIC."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Timeline:
    """The phases of one process in the order they ended."""

    phases: list[Phase] = field(default_factory=list)

    def add(self, name: str, start_ns: int, end_ns: int | None = None) -> None:
        self.phases.append(Phase(name, start_ns, now_ns() if end_ns is None else end_ns))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the time of its body, also when that raises."""
        start_ns = now_ns()
        try:
            yield
        finally:
            self.add(name, start_ns)

    def to_proto(self) -> list[pb.Phase]:
        return [pb.Phase(name=p.name, start_ns=p.start_ns, end_ns=p.end_ns) for p in self.phases]
