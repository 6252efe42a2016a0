"""Steps on a GPU: inputs are made on the host, copied over, and computed there, by a graph where there is one.

Owns the copies and the choice of graph or eager; the host's tensors may be changed as soon as a call returns, since
each step's are copied to fresh pinned memory first. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch
from preload.engine.layers.ops import LayerCache
from preload.engine.models.decoder import Decoder

from .graphs import DecodeGraphs, GraphInputs, Recorder, TorchRecorder, decode_sizes


class DeviceSteps:
    """Forward passes of one decoder on one device."""

    def __init__(
        self, decoder: Decoder, device: torch.device, *, max_num_seqs: int, max_num_blocks: int,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self._device = decoder, device
        self._max_num_seqs, self._max_num_blocks = max_num_seqs, max_num_blocks
        self._recorder = recorder
        self._inputs: GraphInputs | None = None
        self.graphs: DecodeGraphs | None = None

    def use_graphs(self, layers: Sequence[LayerCache], token_budget: int) -> None:
        """From now on graphs are captured for this KV cache, see `DecodeGraphs.capture_next`."""
        if self._inputs is None:
            self._inputs = GraphInputs(self._max_num_seqs, self._max_num_blocks, self._device)

        def forward(input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
            return self._decoder.forward(input_ids, positions, layers, batch)

        self.graphs = DecodeGraphs(
            forward,
            self._recorder or TorchRecorder(self._device),
            self._inputs,
            decode_sizes(self._max_num_seqs, token_budget),
            self._decoder.spec.vocab_size,
        )

    def drop_graphs(self) -> None:
        """Those of a KV cache that is given back."""
        self.graphs = None

    def hidden(
        self, input_ids: Tensor, positions: Tensor, layers: Sequence[LayerCache], batch: AttentionBatch
    ) -> Tensor:
        """Hidden states of a step, on the device: dtype[num_tokens, hidden_size]."""
        input_ids, positions, batch = self._pinned(input_ids), self._pinned(positions), self._staged(batch)
        if self.graphs is not None:
            found = self.graphs.run(input_ids, positions, batch)
            if found is not None:
                return found
        batch = replace(
            batch,
            query_start_loc=self._over(batch.query_start_loc),
            seq_lens=self._over(batch.seq_lens),
            block_table=self._over(batch.block_table),
            slot_mapping=self._over(batch.slot_mapping),
        )
        return self._decoder.forward(self._over(input_ids), self._over(positions), layers, batch)

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Of the rows asked for, on the device: float32[num_logit_rows, vocab_size]."""
        return self._decoder.compute_logits(hidden[self._over(self._pinned(indices))])

    def _staged(self, batch: AttentionBatch) -> AttentionBatch:
        return replace(
            batch,
            query_start_loc=self._pinned(batch.query_start_loc),
            seq_lens=self._pinned(batch.seq_lens),
            block_table=self._pinned(batch.block_table),
            slot_mapping=self._pinned(batch.slot_mapping),
        )

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._device.type == "cuda" else tensor.clone()

    def _over(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
