"""Steps on a GPU: inputs are made on the host, copied over, and computed there, by a graph where there is one.

Owns the copies and the choice of graph or eager; the host's tensors may be changed as soon as a call returns, since
each step's are copied to fresh pinned memory first. Block tables, which grow with contexts, are not sent: the device
has a copy of the batch's, and each step only what was staged for it crosses. Nothing here waits for the device.
`HostSteps` is the same for
whoever computes beside the model, a drafter, where all is on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch
from preload.engine.layers.ops import LayerCache
from preload.engine.models.decoder import Decoder

from .batch import BlockWrite
from .graphs import DecodeGraphs, GraphInputs, Recorder, TorchRecorder, decode_sizes, graph_keys


class Steps(Protocol):
    """Forward passes of one decoder, wherever it is, from inputs that are on the host."""

    def hidden(
        self, input_ids: Tensor, positions: Tensor, layers: Sequence[LayerCache], batch: AttentionBatch
    ) -> Tensor:
        """Hidden states, where the decoder is: dtype[num_tokens, hidden_size]. Good until the next call."""

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Of the rows asked for, where the decoder is: float32[num_logit_rows, vocab_size]."""

    def over(self, tensor: Tensor) -> Tensor:
        """A tensor of the host where the decoder is."""

    def over_batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Its tensors where the decoder is."""


class HostSteps:
    """Where nothing has to be moved."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def hidden(
        self, input_ids: Tensor, positions: Tensor, layers: Sequence[LayerCache], batch: AttentionBatch
    ) -> Tensor:
        return self._decoder.forward(input_ids, positions, layers, batch)

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return self._decoder.compute_logits(hidden[indices])

    def over(self, tensor: Tensor) -> Tensor:
        return tensor

    def over_batch(self, batch: AttentionBatch) -> AttentionBatch:
        return batch


class DeviceSteps:
    """Forward passes of one decoder on one device. `num_draft_tokens`: how many tokens more than one a step may have
    of a request and still have a graph; 0 without speculation."""

    def __init__(
        self, decoder: Decoder, device: torch.device, *, max_num_seqs: int, max_num_blocks: int,
        num_draft_tokens: int = 0, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self._device = decoder, device
        self._max_num_seqs, self._max_num_blocks = max_num_seqs, max_num_blocks
        self._num_draft_tokens = num_draft_tokens
        self._recorder = recorder
        self._inputs: GraphInputs | None = None
        self.graphs: DecodeGraphs | None = None
        self.table: Tensor | None = None
        """int32[max_num_seqs, max_num_blocks]: the batch's block table."""

    def of_another(self, decoder: Decoder, *, num_draft_tokens: int) -> DeviceSteps:
        """Those of a second decoder on the same device, as large as these."""
        return DeviceSteps(
            decoder, self._device, max_num_seqs=self._max_num_seqs, max_num_blocks=self._max_num_blocks,
            num_draft_tokens=num_draft_tokens, recorder=self._recorder,
        )  # fmt: skip

    def block_table(self, writes: Sequence[BlockWrite], rows: Tensor, width: int) -> Tensor:
        """Of some rows, on the device, after these writes: int32[len(rows), width]. rows: int64[num_reqs]."""
        if self.table is None:
            shape = self._max_num_seqs, self._max_num_blocks
            self.table = torch.zeros(shape, dtype=torch.int32, device=self._device)
        if writes:
            by_row = sorted(writes, key=lambda write: write[0])  # later ones of a row stay later
            counts = torch.tensor([0, *(len(blocks) for _, _, blocks in by_row)])
            where = torch.tensor([row for row, _, _ in by_row]), torch.tensor([start for _, start, _ in by_row])
            values = torch.tensor([block for _, _, blocks in by_row for block in blocks])
            moved = (self.over(tensor.int()) for tensor in (*where, counts.cumsum(0), values))
            self._decoder.scatter(self.table, *moved)
        return self.table[:, :width].index_select(0, self.over(rows))

    def use_graphs(self, layers: Sequence[LayerCache], token_budget: int) -> None:
        """From now on graphs are captured for this KV cache, see `DecodeGraphs.capture_next`."""
        keys = graph_keys(decode_sizes(self._max_num_seqs, token_budget), self._num_draft_tokens, token_budget)
        if self._inputs is None:
            num_tokens = max(key[0] for key in keys)
            block_size = layers[0][0].shape[1]
            self._inputs = GraphInputs(
                self._max_num_seqs, self._max_num_blocks, self._device, num_tokens, block_size=block_size
            )

        def forward(input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
            return self._decoder.forward(input_ids, positions, layers, batch)

        self.graphs = DecodeGraphs(
            forward,
            self._recorder or TorchRecorder(self._device),
            self._inputs,
            keys,
            self._decoder.spec.vocab_size,
            longest_query=1 + self._num_draft_tokens,
        )

    def drop_graphs(self) -> None:
        """Those of a KV cache that is given back."""
        self.graphs = None

    def hidden(
        self, input_ids: Tensor, positions: Tensor, layers: Sequence[LayerCache], batch: AttentionBatch
    ) -> Tensor:
        input_ids, positions, batch = self._pinned(input_ids), self._pinned(positions), self._staged(batch)
        if self.graphs is not None:
            found = self.graphs.run(input_ids, positions, batch)
            if found is not None:
                return found
        moved = self._moved(batch)
        return self._decoder.forward(self._over(input_ids), self._over(positions), layers, moved)

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return self._decoder.compute_logits(hidden[self.over(indices)])

    def over(self, tensor: Tensor) -> Tensor:
        return self._over(self._pinned(tensor))

    def over_batch(self, batch: AttentionBatch) -> AttentionBatch:
        return self._moved(self._staged(batch))

    def _moved(self, batch: AttentionBatch) -> AttentionBatch:
        return replace(
            batch,
            query_start_loc=self._over(batch.query_start_loc),
            seq_lens=self._over(batch.seq_lens),
            block_table=self._over(batch.block_table),
            slot_mapping=self._over(batch.slot_mapping),
        )

    def _staged(self, batch: AttentionBatch) -> AttentionBatch:
        return replace(
            batch,
            query_start_loc=self._pinned(batch.query_start_loc),
            seq_lens=self._pinned(batch.seq_lens),
            block_table=self._pinned(batch.block_table),
            slot_mapping=self._pinned(batch.slot_mapping),
        )

    def _pinned(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor  # it is there already
        return tensor.pin_memory() if self._device.type == "cuda" else tensor.clone()

    def _over(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
