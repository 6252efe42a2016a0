"""The paged attention reference against attention written out per sequence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preload.engine.kernels import attention
from preload.engine.kernels.attention import AttentionBatch, paged_attention, write_kv

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 3, 8, 4, 64


def naive(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last len(query) tokens of one sequence, one token and one head at a time."""
    out = torch.empty_like(query)
    offset = len(keys) - len(query)
    for t in range(len(query)):
        for head in range(query.shape[1]):
            k, v = keys[: offset + t + 1, head // GROUP], values[: offset + t + 1, head // GROUP]
            out[t, head] = torch.softmax(k @ query[t, head] / math.sqrt(HEAD_DIM), dim=0) @ v
    return out


def build(shapes: list[tuple[int, int]], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Sequences of (context, query) tokens in shuffled blocks of a cache that is NaN everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    caches = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), math.nan)
    free = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(shapes), 16, dtype=torch.int32)
    expected, queries = [], []
    for r, (context, num_query) in enumerate(shapes):
        length = context + num_query
        blocks = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        table[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        sequence = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator)
        slots = torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)])
        write_kv(caches[0], caches[1], sequence[0], sequence[1], slots)
        query = torch.randn(num_query, KV_HEADS * GROUP, HEAD_DIM, generator=generator)
        queries.append(query)
        expected.append(naive(query, sequence[0], sequence[1]))
    return torch.cat(queries), caches[0], caches[1], table, torch.cat(expected)


def attend(shapes: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = sorted(shapes, key=lambda shape: shape[1] > 1)
    query, keys, values, table, expected = build(shapes)
    lengths = torch.tensor([n for _, n in shapes])
    batch = AttentionBatch(
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int(),
        seq_lens=torch.tensor([c + n for c, n in shapes], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_decodes=sum(n == 1 for _, n in shapes),
    )
    return paged_attention(query, keys, values, batch), expected


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 20), st.one_of(st.just(1), st.integers(1, 12))), min_size=1, max_size=6))
def test_ragged_batches_equal_attention_per_sequence(shapes: list[tuple[int, int]]) -> None:
    got, expected = attend(shapes)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_bounded_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_GATHERED_ELEMENTS", 1)
    monkeypatch.setattr(attention, "MAX_SCORE_ELEMENTS", 300)
    got, expected = attend([(3, 1), (17, 1), (0, 1), (5, 13)])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_empty_batch_is_no_error() -> None:
    empty = torch.empty(0, dtype=torch.int32)
    batch = AttentionBatch(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=empty,
        block_table=empty.view(0, 0),
        slot_mapping=empty.long(),
        num_decodes=0,
    )
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    query = torch.empty(0, KV_HEADS * GROUP, HEAD_DIM)
    write_kv(caches[0], caches[1], query[:, :KV_HEADS], query[:, :KV_HEADS], batch.slot_mapping)
    assert paged_attention(query, caches[0], caches[1], batch).shape == query.shape
    assert not caches.any()


def test_padding_slots_are_never_written() -> None:
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    tokens = torch.ones(3, KV_HEADS, HEAD_DIM)
    write_kv(caches[0], caches[1], tokens, tokens, torch.tensor([-1, 9, -1]))
    written = caches.view(2, -1, KV_HEADS, HEAD_DIM).any(dim=-1).any(dim=-1).nonzero().tolist()
    assert written == [[0, 9], [1, 9]]
