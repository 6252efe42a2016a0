"""Graphs of the host's: what replays one computes again what was captured, from what is then in the inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class FakeGraph:
    work: Callable[[], torch.Tensor]
    out: torch.Tensor
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.out.copy_(self.work())


@dataclass
class FakeRecorder:
    """Captures on the host. `sizes`: tokens of each capture in order."""

    graphs: list[FakeGraph] = field(default_factory=list)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[FakeGraph, torch.Tensor]:
        work()  # once eagerly, as a capture needs it
        self.graphs.append(FakeGraph(work, work().clone()))
        return self.graphs[-1], self.graphs[-1].out

    @property
    def sizes(self) -> list[int]:
        return [len(graph.out) for graph in self.graphs]
