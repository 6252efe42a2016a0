"""What the kernels' cases do not show: padding, empty batches, garbage, and promises about equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from preload.bench.kernel_cases import make_batch, make_weight, rand
from preload.engine.core.noise import gumbel_noise, hash_tokens
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.attention import paged_attention as reference_attention
from preload.engine.kernels.triton import products, sampling
from preload.engine.kernels.triton.attention import paged_attention, paged_decode
from preload.engine.kernels.triton.elementwise import rms_norm
from preload.engine.kernels.triton.moe import choose_experts, group_pairs, mixture
from preload.engine.kernels.triton.scatter import write_kv
from preload.engine.layers.ops import Heads, LayerCache, TorchOps
from preload.engine.layers.triton_ops import TritonOps

FLOAT32 = torch.float32


def test_requests_that_pad_a_graph_get_zeros_and_disturb_nobody() -> None:
    keys, values, batch = make_batch([(20, 1), (33, 1)], 16, 2, 64, FLOAT32)
    padded = AttentionBatch(
        query_start_loc=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        seq_lens=torch.cat((batch.seq_lens, torch.zeros(2, dtype=torch.int32))),
        block_table=torch.cat((batch.block_table, torch.zeros(2, batch.block_table.shape[1], dtype=torch.int32))),
        slot_mapping=batch.slot_mapping,
        num_decodes=4,
    )
    query = rand(4, 4, 64, dtype=FLOAT32)
    got = paged_attention(query, keys, values, padded)
    torch.testing.assert_close(got[:2], reference_attention(query[:2], keys, values, batch), atol=1e-6, rtol=1e-6)
    assert not got[2:].any()


def test_prefills_that_pad_a_batch_leave_zeros() -> None:
    keys, values, batch = make_batch([(5, 3), (0, 40)], 16, 1, 32, FLOAT32)
    padded = AttentionBatch(
        query_start_loc=torch.tensor([0, 3, 43, 43], dtype=torch.int32),
        seq_lens=torch.cat((batch.seq_lens, torch.zeros(1, dtype=torch.int32))),
        block_table=torch.cat((batch.block_table, torch.zeros(1, batch.block_table.shape[1], dtype=torch.int32))),
        slot_mapping=batch.slot_mapping,
        num_decodes=0,
    )
    query = rand(50, 2, 32, dtype=FLOAT32)
    got = paged_attention(query, keys, values, padded)
    expected = reference_attention(query[:43], keys, values, batch)
    torch.testing.assert_close(got[:43], expected, atol=1e-6, rtol=1e-6)
    assert not got[43:].any()


def test_another_backend_attends_in_eager_steps_only() -> None:
    """After our own kernels have rotated queries and keys and written keys and values."""
    keys, values, batch = make_batch([(20, 1), (5, 3)], 16, 2, 64, FLOAT32)
    batch = replace(batch, slot_mapping=torch.full((4,), -1))
    asked: list[torch.Tensor] = []

    def eagerly(query: torch.Tensor, cache: LayerCache, of: AttentionBatch) -> torch.Tensor:
        asked.append(query)
        return reference_attention(query, *cache, of) + 1000

    attend = TritonOps(torch.device("cpu"), FLOAT32)._attention(Heads(4, 2, 64), eagerly)
    qkv, angles = rand(4, 8 * 64, dtype=FLOAT32), rand(4, 32, dtype=FLOAT32)
    rotation = angles.cos(), angles.sin()
    own = attend(qkv.clone(), rotation, (keys, values), replace(batch, is_replayed=True))
    assert not asked
    others = attend(qkv.clone(), rotation, (keys, values), batch)
    torch.testing.assert_close(others - 1000, own, atol=2e-4, rtol=1e-4)
    expected = TorchOps().attention(Heads(4, 2, 64))(qkv, rotation, (keys.clone(), values.clone()), batch)
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2, 7, 16])
def test_any_number_of_splits_gives_the_same_attention(num_splits: int) -> None:
    keys, values, batch = make_batch([(0, 1), (99, 1), (130, 1)], 16, 1, 64, FLOAT32)
    query = rand(3, 3, 64, dtype=FLOAT32)
    got = torch.empty_like(query)
    paged_decode(query, keys, values, batch.block_table, batch.seq_lens, got, num_splits)
    torch.testing.assert_close(got, reference_attention(query, keys, values, batch), atol=1e-6, rtol=1e-6)


def test_a_token_gets_the_same_bits_in_every_batch() -> None:
    keys, values, batch = make_batch([(70, 1), (3, 1)], 16, 2, 64, FLOAT32)
    query = rand(2, 4, 64, dtype=FLOAT32)
    both = paged_attention(query, keys, values, batch)
    alone = torch.empty_like(query[1:])
    paged_decode(query[1:], keys, values, batch.block_table[1:], batch.seq_lens[1:], alone)
    assert torch.equal(alone, both[1:])


def test_empty_batches_launch_nothing() -> None:
    keys, values, batch = make_batch([], 16, 2, 64, FLOAT32)
    query = torch.empty(0, 4, 64)
    assert paged_attention(query, keys, values, batch).shape == (0, 4, 64)
    write_kv(keys, values, query[:, :2], query[:, :2], batch.slot_mapping)
    assert bool(keys.isnan().all())
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    parts = make_weight("mxfp4", 16, 32).parts
    assert products.product(torch.empty(0, 32), "mxfp4", parts).shape == (0, 16)
    weights, experts = choose_experts(torch.empty(0, 4), 2, renormalize=True)
    assert mixture(torch.empty(0, 32), weights, experts, ("mxfp4", parts), ("mxfp4", parts), 4).shape == (0, 32)
    none = torch.empty(0, dtype=torch.int64)
    assert sampling.gumbel_argmax(torch.empty(0, 9), none.bool(), none, none).shape == (0,)


def test_pairs_are_grouped_by_expert_in_blocks_of_their_own() -> None:
    experts = torch.tensor([[0, 2], [2, 0], [2, 4], [2, 0], [2, 0]])
    blocks = group_pairs(experts, 5, 2)
    seen = []
    for expert, first, end in zip(blocks.expert.tolist(), blocks.first.tolist(), blocks.end.tolist(), strict=True):
        if expert == 5:
            continue
        pairs = blocks.order[first : min(first + 2, end)].tolist()
        assert pairs
        assert set(experts.flatten()[pairs].tolist()) == {expert}
        seen += pairs
    assert sorted(seen) == list(range(10))


def test_sampled_tokens_are_those_of_the_host() -> None:
    """Over many rows, so that a difference in the noise's last bits would have its chance."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, 300, generator=generator)
    seeds = torch.randint(-(1 << 62), 1 << 62, (400,), generator=generator)
    positions = torch.arange(400)
    expected = (x + gumbel_noise(seeds, positions, hash_tokens(300))).argmax(dim=1)
    drawn = torch.ones(400, dtype=torch.bool)
    assert torch.equal(sampling.gumbel_argmax(x, drawn, seeds, positions), expected)


def test_a_token_that_is_truncated_is_never_sampled() -> None:
    x = torch.full((50, 5000), -torch.inf)
    x[:, 4321] = 0.0
    drawn = torch.arange(50) % 2 > 0
    tokens = sampling.gumbel_argmax(x, drawn, torch.arange(50), torch.arange(50))
    assert tokens.tolist() == [4321] * 50


@pytest.mark.parametrize("layout", products.LAYOUTS)
def test_rows_of_a_larger_tensor_are_read_in_place(layout: str) -> None:
    """x, residual and out are columns of wider tensors whose other columns hold NaN and stay as they are."""
    weight = make_weight(layout, 40, 128)
    wide = torch.full((3, 164), torch.nan)
    wide[:, 10:138] = rand(3, 128, dtype=FLOAT32)
    out = torch.full((3, 90), 7.0)
    products.product(wide[:, 10:138], layout, weight.parts, out=out[:, 20:60])
    expected = wide[:, 10:138] @ weight.rows(slice(None)).T
    torch.testing.assert_close(out[:, 20:60], expected, atol=2e-6, rtol=1e-5)
    assert bool((out[:, :20] == 7).all())
    assert bool((out[:, 60:] == 7).all())
