"""Native attention against the torch reference, over shuffled blocks with garbage beyond every sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from preload.engine.errors import RequestError
from preload.engine.kernels.attention import AttentionBatch, paged_attention, write_kv
from preload.engine.kernels.native.library import NativeLibrary
from preload.engine.kernels.rotary import apply_rotary
from preload.engine.layers.native_ops import native_ops
from preload.engine.layers.ops import Attention, Heads, TorchOps

NUM_BLOCKS, BLOCK_SIZE = 16, 16
BATCHES = [
    [(0, 1)],
    [(15, 1), (16, 1), (40, 1)],
    [(7, 1), (0, 12), (5, 9), (30, 3)],
    [(0, 57)],
    [(150, 40)],
]


def make_batch(shapes: list[tuple[int, int]], block_size: int = BLOCK_SIZE) -> AttentionBatch:
    """Sequences of (context, query) tokens, one query token first, in shuffled blocks."""
    free = (torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(3)) + 1).tolist()
    table, slots = torch.zeros(len(shapes), 32, dtype=torch.int32), []
    for r, (context, num_query) in enumerate(shapes):
        blocks = [free.pop() for _ in range(-(-(context + num_query) // block_size))]
        table[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(context, context + num_query)]
    lengths = torch.tensor([n for _, n in shapes])
    return AttentionBatch(
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int(),
        seq_lens=torch.tensor([sum(shape) for shape in shapes], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        num_decodes=sum(n == 1 for _, n in shapes),
    )


def caches_of(batch: AttentionBatch, heads: Heads, block_size: int = BLOCK_SIZE) -> torch.Tensor:
    """NaN where no sequence has a token: none of it may reach a result."""
    caches = torch.full((2, NUM_BLOCKS, block_size, heads.num_kv_heads, heads.head_dim), math.nan)
    flat = caches.view(2, -1, heads.num_kv_heads, heads.head_dim)
    for r, length in enumerate(batch.seq_lens.tolist()):
        for p in range(length):
            slot = int(batch.block_table[r, p // block_size]) * block_size + p % block_size
            flat[:, slot] = torch.randn(2, heads.num_kv_heads, heads.head_dim)
    return caches


def native_order(caches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches as the reference has them, in the order that native/float_attention.h describes, or brief_attention.h if
    they are bfloat16; in memory of many layers."""
    _, num_blocks, block_size, num_kv_heads, head_dim = caches.shape
    keys = caches[0].view(num_blocks, block_size // 16, 16, num_kv_heads, head_dim).permute(0, 3, 1, 4, 2)
    values = caches[1].transpose(1, 2)
    if caches.dtype == torch.bfloat16:
        keys = keys.unflatten(3, (-1, 2)).transpose(4, 5)  # pairs of dimensions
        values = values.reshape(num_blocks, num_kv_heads, block_size // 16, 8, 2, head_dim // 16, 16)
        values = values.permute(0, 1, 2, 5, 3, 6, 4)
    layers = torch.full((num_blocks, 3, 2, *caches.shape[2:]), math.nan, dtype=caches.dtype)
    layers[:, 1, 0] = keys.reshape(caches.shape[1:])
    layers[:, 1, 1] = values.reshape(caches.shape[1:])
    return layers[:, 1, 0], layers[:, 1, 1]


@pytest.mark.parametrize("shapes", BATCHES)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(4, 4, 128), Heads(10, 2, 32), Heads(6, 1, 80)])
@pytest.mark.parametrize("variant", ["native", "without AVX-512"])
def test_attention_equals_the_reference(
    open_library: Any, variant: str, heads: Heads, shapes: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    batch = make_batch(shapes)
    num_tokens = len(batch.slot_mapping)
    caches = caches_of(batch, heads)
    native_caches = native_order(caches)
    qkv = torch.randn(num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    angles = torch.rand(num_tokens, heads.head_dim // 2) * 6
    rotation = (angles.cos(), angles.sin())
    expected = TorchOps().attention(heads)(qkv.clone(), rotation, tuple(caches), batch)
    attend = native_ops(open_library(variant, 2), torch.float32).attention(heads)
    got = attend(qkv, rotation, native_caches, batch)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for native, expected_cache in zip(native_caches, native_order(caches), strict=True):
        torch.testing.assert_close(native, expected_cache, atol=1e-6, rtol=1e-6, equal_nan=True)


def in_bfloat16(library: NativeLibrary, heads: Heads) -> Attention:
    if "bfloat16" not in library.available_units:
        pytest.skip("the CPU or the compiler lacks AVX-512 BF16")
    return native_ops(library, torch.float32, "bfloat16").attention(heads)


@pytest.mark.parametrize("shapes", BATCHES)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(4, 4, 128), Heads(10, 2, 32), Heads(20, 1, 96)])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("variant", ["native", "without AMX"])
def test_attention_in_bfloat16_is_rounded_to_that_and_no_more(
    open_library: Any, variant: str, block_size: int, heads: Heads, shapes: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    batch = make_batch(shapes, block_size)
    caches = caches_of(batch, heads, block_size).bfloat16()
    native_caches = native_order(caches)
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    qkv = torch.randn(len(batch.slot_mapping), sum(sizes), heads.head_dim)
    angles = torch.rand(len(qkv), heads.head_dim // 2) * 6
    rotation = (angles.cos(), angles.sin())
    query, key, value = torch.split(qkv, sizes, dim=1)
    query, key = (apply_rotary(part, *rotation).bfloat16() for part in (query, key))
    write_kv(caches[0], caches[1], key, value.bfloat16(), batch.slot_mapping)
    expected = paged_attention(query.float(), caches[0].float(), caches[1].float(), batch).flatten(1)
    got = in_bfloat16(open_library(variant, 2), heads)(qkv.flatten(1), rotation, native_caches, batch)
    assert float((got - expected).norm() / expected.norm()) < 2e-3  # what is left: the weights' rounding
    for native, expected_cache in zip(native_caches, native_order(caches), strict=True):
        torch.testing.assert_close(native, expected_cache, atol=1e-6, rtol=0.01, equal_nan=True)


@pytest.mark.parametrize("variant", ["native", "without AMX"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_decoded_or_prefilled(open_library: Any, dtype: torch.dtype, variant: str) -> None:
    torch.manual_seed(0)
    heads = Heads(9, 3, 64)
    whole, last = make_batch([(0, 57)]), make_batch([(56, 1)])
    caches = native_order(caches_of(whole, heads).to(dtype))
    qkv = torch.randn(57, 15 * 64)
    rotation = torch.rand(57, 32), torch.rand(57, 32)
    library = open_library(variant, 2)
    exact = native_ops(library, torch.float32).attention(heads)
    attend = in_bfloat16(library, heads) if dtype == torch.bfloat16 else exact
    prefilled = attend(qkv.clone(), rotation, caches, whole)
    decoded = attend(qkv[56:].clone(), (rotation[0][56:], rotation[1][56:]), caches, last)
    assert torch.equal(decoded[0], prefilled[56])


def test_padding_slots_are_never_written(open_library: Any) -> None:
    heads = Heads(2, 2, 16)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([1, 1], dtype=torch.int32),
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        slot_mapping=torch.tensor([-1, 9]),
        num_decodes=2,
    )
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, 16)
    rotation = torch.ones(2, 8), torch.zeros(2, 8)
    native_ops(open_library("native", 1), torch.float32).attention(heads)(
        torch.ones(2, 6 * 16), rotation, tuple(caches), batch
    )
    keys, values = caches.view(2, NUM_BLOCKS, 2, 16, 16)
    assert keys.any(dim=(1, 2)).nonzero().tolist() == [[0, 9]]  # the vector's lane is the position
    assert values.any(dim=(1, 3)).nonzero().tolist() == [[0, 9]]


def test_blocks_that_are_no_whole_vectors_are_refused(open_library: Any) -> None:
    batch, heads = make_batch([(0, 1)]), Heads(2, 2, 16)
    caches = torch.zeros(2, NUM_BLOCKS, 8, 2, 16)
    with pytest.raises(AssertionError, match="blocks of 8 tokens"):
        native_ops(open_library("native", 1), torch.float32).attention(heads)(
            torch.ones(1, 6 * 16), (torch.ones(1, 8), torch.zeros(1, 8)), tuple(caches), batch
        )


def test_what_the_kernels_do_not_cover_is_left_to_torch_and_said(open_library: Any) -> None:
    ops = native_ops(open_library("native", 1), torch.float32)
    ops.attention(Heads(4, 2, 24))
    assert "attention by torch, because head_dim 24" in ops.describe()


def test_caches_that_bfloat16_does_not_fit_stay_in_float32_or_are_refused_if_asked_for(open_library: Any) -> None:
    library, heads = open_library("bfloat16", 1), Heads(4, 2, 48)
    if "bfloat16" not in library.units:
        pytest.skip("the CPU or the compiler lacks AVX-512 BF16")
    ops = native_ops(library, torch.float32)
    assert ops.cache_dtype(Heads(4, 2, 64)) == torch.bfloat16
    assert ops.cache_dtype(heads) == torch.float32
    with pytest.raises(RequestError, match="kv_cache_dtype is bfloat16, and head_dim 48"):
        native_ops(library, torch.float32, "bfloat16").cache_dtype(heads)
    assert native_ops(library, torch.float32, "float32").cache_dtype(Heads(4, 2, 64)) == torch.float32


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 32), (torch.bfloat16, 48)])
def test_caches_that_no_kernel_reads_are_refused(open_library: Any, dtype: torch.dtype, head_dim: int) -> None:
    heads, batch = Heads(2, 2, head_dim), make_batch([(0, 1)])
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, head_dim, dtype=dtype)
    rotation = torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)
    with pytest.raises(AssertionError, match="no native kernel attends"):
        native_ops(open_library("native", 1), torch.float32).attention(heads)(
            torch.ones(1, 6 * head_dim), rotation, tuple(caches), batch
        )


def test_a_cpu_without_bfloat16_refuses_keys_and_values_in_it(open_library: Any) -> None:
    with pytest.raises(RequestError, match="this CPU has neither AVX-512 BF16"):
        native_ops(open_library("without AVX-512", 1), torch.float32, "bfloat16")


def test_one_batch_over_caches_of_other_strides_reads_each_where_it_lies(open_library: Any) -> None:
    torch.manual_seed(0)
    heads, batch = Heads(2, 2, 16), make_batch([(20, 3)])
    reference = caches_of(batch, heads)
    qkv, rotation = torch.randn(3, 6 * 16), (torch.ones(3, 8), torch.zeros(3, 8))
    of_many_layers = native_order(reference)
    alone = tuple(part.contiguous() for part in native_order(reference))
    attend = native_ops(open_library("native", 1), torch.float32).attention(heads)
    first = attend(qkv.clone(), rotation, of_many_layers, batch)
    assert torch.equal(attend(qkv.clone(), rotation, alone, batch), first)


def test_keys_and_values_that_lie_otherwise_are_refused(open_library: Any) -> None:
    heads, batch = Heads(2, 2, 16), make_batch([(0, 1)])
    keys, values = native_order(caches_of(batch, heads))
    with pytest.raises(AssertionError, match="must lie alike"):
        native_ops(open_library("native", 1), torch.float32).attention(heads)(
            torch.ones(1, 6 * 16), (torch.ones(1, 8), torch.zeros(1, 8)), (keys, values.contiguous()), batch
        )
