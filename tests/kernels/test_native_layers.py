"""A decoder's layers in one native call: the same bits as one operation after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from preload.engine.core.kv_cache import KVCache
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.layers.native_layers import NativeLayers
from preload.engine.layers.native_ops import native_ops
from preload.engine.layers.ops import one_by_one
from preload.engine.models.decoder import Decoder

NUM_LAYERS = 3


@pytest.fixture(scope="module", params=["native", "bfloat16", "bfloat16 without AMX"])
def decoder(request: pytest.FixtureRequest, open_library: Any, demo_weights: Any) -> Decoder:
    spec, tensors, layouts = demo_weights
    spec = type(spec).from_dict({**spec.to_dict(), "num_layers": NUM_LAYERS})
    dropped = tuple(f"model.layers.{i}." for i in range(NUM_LAYERS, 30))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    ops = native_ops(open_library(request.param, 2), torch.float32)
    return Decoder(spec, kept, layouts, torch.float32, ops)


def batch_of(lengths: list[int], before: list[int]) -> tuple[AttentionBatch, torch.Tensor]:
    """Sequences in blocks of their own, and the positions of their tokens."""
    positions = [torch.arange(start, start + length) for start, length in zip(before, lengths, strict=True)]
    table = torch.arange(1, 1 + 4 * len(lengths), dtype=torch.int32).view(-1, 4)
    slots = [table[r, p // 16].long() * 16 + p % 16 for r, p in enumerate(positions)]
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([a + b for a, b in zip(before, lengths, strict=True)], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        num_decodes=sum(length == 1 for length in lengths),
    )
    return batch, torch.cat(positions)


def test_layers_in_one_call_are_the_same_bits_as_their_operations(decoder: Decoder) -> None:
    assert isinstance(decoder._run_layers, NativeLayers)
    caches = [KVCache(decoder.spec, 24, 16, decoder.cache_dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    # Then decoding after that; and enough tokens that each thread has its own.
    for lengths, before in (
        ([1, 40, 7], [0, 0, 0]),
        ([1, 1, 1], [1, 40, 7]),
        ([60, 64, 64, 64, 30], [2, 0, 0, 0, 0]),
    ):
        batch, positions = batch_of(lengths, before)
        hidden = torch.randn(len(positions), decoder.spec.hidden_size, generator=generator)
        rotation = decoder.rope(positions)
        whole = decoder._run_layers(hidden.clone(), rotation, caches[0].layers, batch)
        parts = one_by_one(decoder.layers)(hidden.clone(), rotation, caches[1].layers, batch)
        assert torch.equal(whole, parts)
        slots = [(int(s) // 16, int(s) % 16) for s in batch.slot_mapping]
        for (keys, values), (other_keys, other_values) in zip(caches[0].layers, caches[1].layers, strict=True):
            for block, _ in slots:
                assert torch.equal(keys[block].nan_to_num(), other_keys[block].nan_to_num())
                assert torch.equal(values[block].nan_to_num(), other_values[block].nan_to_num())


def test_a_new_cache_is_noticed(decoder: Decoder) -> None:
    batch, positions = batch_of([5], [0])
    hidden, rotation = torch.randn(5, decoder.spec.hidden_size), decoder.rope(positions)
    results = [
        decoder._run_layers(hidden.clone(), rotation, KVCache(decoder.spec, 8, 16, decoder.cache_dtype).layers, batch)
        for _ in range(3)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_layers_that_torch_has_a_part_in_are_left_apart(open_library: Any, decoder: Decoder) -> None:
    ops = native_ops(open_library("native", 1), torch.float32)

    class Foreign:
        def operations(self) -> tuple[object, ...]:
            return (*decoder.layers[0].operations()[:4], lambda x, residual: x)

        def __call__(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
            return hidden + 1

    run = ops.layers([decoder.layers[0], Foreign()])
    assert not isinstance(run, NativeLayers)
    only = ops.layers([Foreign(), Foreign()])
    assert torch.equal(
        only(torch.zeros(2, 3), (torch.empty(0),) * 2, [(torch.empty(0),) * 2] * 2, None), torch.full((2, 3), 2.0)
    )
