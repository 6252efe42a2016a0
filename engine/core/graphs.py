"""Graphs of decode steps: recorded once, replayed with other inputs, so that a step costs one launch.

Owns which shapes have a graph, the tensors that graphs read, and how a step is padded to the next larger shape. A
graph is keyed by (num_tokens, num_reqs): with as many tokens as requests it is for steps of one token each; with
more, for steps that verify drafts, where a request has any number of tokens up to those of a full draft. A step with
more of one request, which is a prompt's, or one that no graph is large enough for, runs eagerly. Graphs are captured
largest first, all in one memory pool, so that smaller ones live in the memory of the first; each after one eager run
of its shape on random ids, which compiles its kernels. Who captures is a `Recorder`: of torch on a GPU, and in tests
whatever notes what it was asked. Invariants: a graph reads only tensors of `GraphInputs`; padding writes nothing
(slots −1), reads only the null block, and has no tokens (seq_lens 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch

Key = tuple[int, int]
"""(num_tokens, num_reqs)"""

Forward = Callable[[Tensor, Tensor, AttentionBatch], Tensor]
"""(input_ids: int64[num_tokens], positions: int64[num_tokens], batch) → hidden: dtype[num_tokens, hidden_size]"""


class Graph(Protocol):
    def replay(self) -> None:
        """Computes again what was captured, from the present content of the inputs."""


class Recorder(Protocol):
    """Captures work on a device."""

    def capture(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Runs `work` once for its kernels, and captures a second run. The tensor is what every replay fills."""


class TorchRecorder:
    """CUDA graphs of torch, in one pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = work()
        self._pool = graph.pool()
        return graph, out


def decode_sizes(max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Numbers of requests that have graphs, ascending: powers of two up to 8, then every 8th, and the largest."""
    largest = min(max_num_seqs, max_num_tokens)
    return sorted({size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size <= largest} | {largest})


def graph_keys(sizes: Sequence[int], num_draft_tokens: int, max_num_tokens: int) -> list[Key]:
    """The graphs of those numbers of requests, ascending: for a token of each, and, if drafts are verified, for
    1 + num_draft_tokens of each, as far as a step may be that large."""
    per_request = 1 + num_draft_tokens
    verifying = {(size * per_request, size) for size in sizes if size * per_request <= max_num_tokens}
    return sorted({(size, size) for size in sizes} | verifying)


class GraphInputs:
    """The tensors that graphs read, as large as the largest step. Content beyond a step's own is padding."""

    def __init__(
        self, max_num_reqs: int, max_num_blocks: int, device: torch.device, max_num_tokens: int | None = None,
        *, block_size: int,
    ) -> None:  # fmt: skip
        """max_num_tokens: by default one for each request."""
        int64, int32 = torch.int64, torch.int32
        self._block_size = block_size
        max_num_tokens = max_num_tokens or max_num_reqs
        self.input_ids = torch.zeros(max_num_tokens, dtype=int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=int64, device=device)
        self.query_start_loc = torch.arange(max_num_reqs + 1, dtype=int32, device=device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=int32, device=device)
        self.block_table = torch.zeros(max_num_reqs, max_num_blocks, dtype=int32, device=device)
        self.slot_mapping = torch.full((max_num_tokens,), -1, dtype=int64, device=device)

    def fill(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, key: Key) -> None:
        """A step's inputs, padded to the key. Tensors come from anywhere; block tables may be narrower than ours."""
        num_tokens, num_reqs = input_ids.shape[0], batch.seq_lens.shape[0]
        tokens, reqs, width = slice(num_tokens, key[0]), slice(num_reqs, key[1]), batch.block_table.shape[1]
        self.input_ids[:num_tokens].copy_(input_ids, non_blocking=True)
        self.input_ids[tokens].zero_()
        self.positions[:num_tokens].copy_(positions, non_blocking=True)
        self.positions[tokens].zero_()
        self.query_start_loc[: num_reqs + 1].copy_(batch.query_start_loc, non_blocking=True)
        self.query_start_loc[num_reqs + 1 : key[1] + 1].fill_(num_tokens)
        self.seq_lens[:num_reqs].copy_(batch.seq_lens, non_blocking=True)
        self.seq_lens[reqs].zero_()
        self.block_table[:num_reqs, :width].copy_(batch.block_table, non_blocking=True)
        self.block_table[:num_reqs, width:].zero_()
        self.block_table[reqs].zero_()
        self.slot_mapping[:num_tokens].copy_(batch.slot_mapping, non_blocking=True)
        self.slot_mapping[tokens].fill_(-1)

    def randomize(self, key: Key, vocab_size: int) -> None:
        """Random ids on slots that are not written and blocks that are null: what warm-ups and captures run on.

        Contexts are a block longer than what is asked of them, as far as a table reaches: a graph is the same for all
        lengths, and longer ones would take a capture's eager run longer."""
        num_tokens, num_reqs = key
        longest = self.block_table.shape[1] * self._block_size
        per_request = min(num_tokens // num_reqs, longest)
        length = min(per_request + self._block_size, longest)
        self.input_ids[:num_tokens].random_(0, vocab_size)
        self.positions[:num_tokens].random_(0, length)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32) * per_request
        self.query_start_loc[: num_reqs + 1].copy_(starts)
        self.seq_lens[:num_reqs].fill_(length)
        self.block_table[:num_reqs].zero_()
        self.slot_mapping[:num_tokens].fill_(-1)

    def view(self, key: Key) -> tuple[Tensor, Tensor, AttentionBatch]:
        """What a graph of this key reads."""
        num_tokens, num_reqs = key
        batch = AttentionBatch(
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            block_table=self.block_table[:num_reqs],
            slot_mapping=self.slot_mapping[:num_tokens],
            num_decodes=num_reqs if num_tokens == num_reqs else 0,
            is_replayed=True,
        )
        return self.input_ids[:num_tokens], self.positions[:num_tokens], batch


@dataclass(frozen=True)
class _Captured:
    graph: Graph
    out: Tensor


class DecodeGraphs:
    """Graphs of one decoder on one KV cache. A new cache needs new graphs: their addresses are in them."""

    def __init__(
        self, forward: Forward, recorder: Recorder, inputs: GraphInputs, keys: Sequence[Key], vocab_size: int,
        *, longest_query: int,
    ) -> None:  # fmt: skip
        """longest_query: tokens of one request in a step that a graph is for, 1 + the longest draft."""
        self._forward, self._recorder, self._inputs = forward, recorder, inputs
        self._vocab_size, self._longest_query = vocab_size, longest_query
        self._missing: list[Key] = sorted(keys)
        self._captured: dict[Key, _Captured] = {}
        self.num_replayed = 0
        self.num_eager = 0

    @property
    def keys(self) -> list[Key]:
        """Those captured, ascending."""
        return sorted(self._captured)

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def capture_next(self) -> Key | None:
        """Captures the largest shape that has no graph yet; None if all have one."""
        if not self._missing:
            return None
        key = self._missing.pop()
        self._inputs.randomize(key, self._vocab_size)
        views = self._inputs.view(key)
        self._captured[key] = _Captured(*self._recorder.capture(lambda: self._forward(*views)))
        return key

    def capture_all(self) -> None:
        while self.capture_next() is not None:
            pass

    def key_for(self, num_tokens: int, batch: AttentionBatch) -> Key | None:
        """The smallest captured shape that this step fits in; None if it has to run eagerly. query_start_loc: the
        host's."""
        num_reqs = batch.seq_lens.shape[0]
        if not num_reqs or batch.block_table.shape[1] > self._inputs.block_table.shape[1]:
            return None
        decodes = num_tokens == num_reqs == batch.num_decodes
        if not decodes and int(batch.query_start_loc.diff().max()) > self._longest_query:
            return None
        kind = (key for key in self._captured if (key[0] == key[1]) == decodes)
        return min((key for key in kind if key[0] >= num_tokens and key[1] >= num_reqs), default=None)

    def run(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor | None:
        """A step's hidden states by replay: dtype[num_tokens, hidden_size], good until the next call. None if there
        is no graph for it. Tensors come from anywhere, but for query_start_loc, which the host looks at."""
        num_tokens = input_ids.shape[0]
        key = self.key_for(num_tokens, batch)
        if key is None:
            self.num_eager += 1
            return None
        self._inputs.fill(input_ids, positions, batch, key)
        captured = self._captured[key]
        captured.graph.replay()
        self.num_replayed += 1
        return captured.out[:num_tokens]
