"""Every GPU kernel beside its reference, on small ragged inputs: what the kernels' table and their tests go through.

A case makes inputs for a dtype and returns what the kernel computed and what its reference computed. In Triton's
interpreter both are compared; without it the launches are recorded, and compiled for the targets: so what is compiled
is what is launched. Needs the package triton. The tolerance is of the largest error over the largest magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from preload.engine.core import noise
from preload.engine.kernels import activation, attention, moe, norm, rotary, scaled_products, staging
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.triton import attention as fast_attention
from preload.engine.kernels.triton import elementwise, products, sampling, scatter
from preload.engine.kernels.triton import moe as fast_moe
from preload.engine.layers.linear import product_by_rows
from preload.engine.layers.weights import Weight
from preload.engine.loading.gguf_types import BLOCK_TYPES
from preload.engine.quantization import (
    fp8_per_block,
    fp8_per_tensor,
    int4_group32,
    int8_per_channel,
    mxfp4,
    mxfp8,
    nvfp4,
)

Results = Sequence[tuple[Tensor, Tensor]]
"""(by the kernel, by its reference), compared one by one."""

FLOATS = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.int32: 0.0}
"""Of the largest magnitude: float32 sums in another order; two roundings to bfloat16 in another place."""

_QUANTIZERS = {
    m.LAYOUT: m.quantize for m in (int8_per_channel, int4_group32, fp8_per_tensor, fp8_per_block, mxfp8, mxfp4, nvfp4)
} | {layout: partial(int4_group32.quantize, group_size=size) for layout, size in int4_group32.WIDER_LAYOUTS.items()}


@dataclass(frozen=True)
class Case:
    """One kernel on one kind of input."""

    name: str
    run: Callable[[torch.dtype], Results]
    dtypes: Sequence[torch.dtype] = FLOATS
    min_capability: int = 80
    """Compute capability · 10 that the kernel needs."""


def maximal_error(results: Results) -> float:
    """The largest difference over the largest magnitude of its reference. Raises AssertionError on another shape."""
    worst = 0.0
    for got, expected in results:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise AssertionError(f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}")
        if got.numel():
            difference = (got.double() - expected.double()).abs().amax()
            worst = max(worst, float(difference / expected.double().abs().amax().clamp(min=1e-30)))
    return worst


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def make_weight(layout: str, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Weight:
    """A random weight whose products are of order 1."""
    dense = rand(rows, cols, dtype=torch.float32, seed=7) / cols**0.5
    if layout == "dense":
        return Weight(layout, layout, {"weight": dense.to(dtype)})
    if layout in _QUANTIZERS:
        return Weight(layout, layout, _QUANTIZERS[layout](dense))
    kind = BLOCK_TYPES[layout.removeprefix("gguf.")]
    shape = (rows, cols // kind.block_size)
    generator = torch.Generator().manual_seed(rows)
    whole = (*shape, kind.block_bytes)
    blocks = torch.randint(0, 256, whole, dtype=torch.uint8, generator=generator, device="cpu")
    for at in (0, 2) if kind.name == "q4_1" else (0,):
        halves = (torch.rand(shape, generator=generator, device="cpu") / 64).half()
        blocks[..., at : at + 2] = halves.unsqueeze(-1).view(torch.uint8)
    return Weight(layout, layout, {"weight": blocks.flatten(1).to(torch.get_default_device())})


def make_batch(
    shapes: Sequence[tuple[int, int]], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Caches and batch of sequences of (context, query) tokens; unused slots hold NaN. Decodes first."""
    lengths = [context + num_query for context, num_query in shapes]
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    free = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1), device="cpu").add(1).tolist()
    table = torch.zeros(len(shapes), max(needed, default=0) + 1, dtype=torch.int32)
    for r, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(needed[r])]
        table[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        positions = torch.arange(length)
        slots = table[r, positions // block_size].long() * block_size + positions % block_size
        caches.view(2, -1, num_kv_heads, head_dim)[:, slots] = rand(
            2, length, num_kv_heads, head_dim, dtype=dtype, seed=r
        )
    queries = torch.tensor([0, *(n for _, n in shapes)])
    batch = AttentionBatch(
        query_start_loc=queries.cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_decodes=sum(n == 1 for _, n in shapes),
    )
    return caches[0], caches[1], batch


def attend(
    dtype: torch.dtype, *, shapes: Sequence[tuple[int, int]], heads: tuple[int, int, int], block_size: int
) -> Results:
    """heads: query heads, key heads, head_dim."""
    num_heads, num_kv_heads, head_dim = heads
    keys, values, batch = make_batch(shapes, block_size, num_kv_heads, head_dim, dtype)
    query = rand(sum(n for _, n in shapes), num_heads, head_dim, dtype=dtype)
    got = fast_attention.paged_attention(query, keys, values, batch)
    return [(got, attention.paged_attention(query, keys, values, batch))]


def write(dtype: torch.dtype) -> Results:
    qkv = rand(5, 9, 24, dtype=dtype)
    key, value = qkv[:, 3:6], qkv[:, 6:]
    slots = torch.tensor([3, -1, 11, 0, -1])
    got, expected = torch.zeros(2, 2, 3, 4, 3, 24, dtype=dtype)
    scatter.write_kv(got[0], got[1], key, value, slots)
    attention.write_kv(expected[0], expected[1], key, value, slots)
    return [(got, expected)]


def normalize(dtype: torch.dtype) -> Results:
    results: list[tuple[Tensor, Tensor]] = []
    for num_tokens, size in ((3, 576), (1, 100), (0, 64)):
        x, weight = rand(num_tokens, size, dtype=dtype) * 3, rand(size, dtype=dtype)
        residual = rand(num_tokens, size, dtype=dtype, seed=5)
        results.append((elementwise.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5)))
        expected, total = norm.add_rms_norm(x, residual, weight, 1e-5)
        results += [(elementwise.rms_norm(x, weight, 1e-5, residual), expected), (residual, total)]
    return results


def turn(dtype: torch.dtype) -> Results:
    results = []
    for num_tokens, num_heads, head_dim in ((5, 9, 64), (2, 3, 256), (3, 1, 80), (0, 2, 16)):
        qkv = rand(num_tokens, num_heads + 2, head_dim, dtype=dtype)
        angles = rand(num_tokens, head_dim // 2, dtype=torch.float32) * 9
        expected = qkv.clone()
        expected[:, :num_heads] = rotary.apply_rotary(qkv[:, :num_heads], angles.cos(), angles.sin())
        elementwise.rotate(qkv[:, :num_heads], angles.cos(), angles.sin())
        results.append((qkv, expected))
    return results


def gate(dtype: torch.dtype) -> Results:
    results = []
    for num_tokens, size in ((3, 1536), (1, 77), (0, 64)):
        first, second = (rand(num_tokens, 2 * size, dtype=dtype) * 4).chunk(2, dim=1)
        results.append((elementwise.swiglu(first, second), activation.swiglu(first, second)))
    return results


def multiply(dtype: torch.dtype, *, layout: str) -> Results:
    """Ragged rows and tokens; 288 columns: more than two tiles, and not whole ones."""
    results = []
    cols = 384 if layout in int4_group32.WIDER_LAYOUTS else 288
    for num_tokens, rows in ((1, 37), (19, 150), (70, 131), (0, 40)):
        weight = make_weight(layout, rows, cols, dtype)
        x, bias = rand(num_tokens, cols + 12, dtype=dtype)[:, :cols], rand(rows, dtype=dtype)
        residual = rand(num_tokens, rows + 8, dtype=dtype)[:, :rows]
        expected = product_by_rows(x, weight)
        results.append((products.product(x, layout, weight.parts), expected))
        out = products.product(x, layout, weight.parts, bias=bias, residual=residual, out=residual.clone())
        results.append((out, residual + (expected + bias)))
    return results


def multiply_scaled(dtype: torch.dtype, *, layout: str, native: bool) -> Results:
    results = []
    for num_tokens, rows in ((1, 37), (19, 150), (0, 40)):
        weight = make_weight(layout, rows, 288)
        quantized, scale = fp8_per_block.quantize_activations(rand(num_tokens, 288, dtype=dtype) * 2)
        got = products.scaled_product(quantized, scale, weight.parts, dtype, native=native)
        results.append((got, scaled_products.scaled_product(quantized, scale, layout, weight.parts, dtype)))
    return results


def quantize(dtype: torch.dtype) -> Results:
    results: list[tuple[Tensor, Tensor]] = []
    for num_tokens, cols in ((3, 288), (1, 128), (2, 100), (0, 128)):
        x = rand(num_tokens, cols, dtype=dtype) * torch.logspace(-6, 2, cols).to(dtype)
        got, expected = products.quantize_activations(x), fp8_per_block.quantize_activations(x)
        results += [(got[0].view(torch.uint8).int(), expected[0].contiguous().view(torch.uint8).int())]
        results += [(got[1], expected[1])]
    return results


def mix_experts(dtype: torch.dtype, *, layout: str, top_k: int, stored: torch.dtype | None = None) -> Results:
    """`stored`: of dense weights, by default as the activations."""
    num_experts, hidden, inner = 5, 64, 96
    gate_up = make_weight(layout, num_experts * 2 * inner, hidden, stored or dtype)
    down = make_weight(layout, num_experts * hidden, inner, stored or dtype)
    halves = (layout, gate_up.parts), (layout, down.parts)
    results: list[tuple[Tensor, Tensor]] = []
    for num_tokens in (1, 23, 0):
        x, logits = rand(num_tokens, hidden, dtype=dtype), rand(num_tokens, num_experts, dtype=dtype)
        logits[:, 3] = -9.0  # an expert that nobody chooses
        expected = moe.choose_experts(logits, top_k, renormalize=True)
        results += zip(fast_moe.choose_experts(logits, top_k, renormalize=True), expected, strict=True)
        plain = moe.choose_experts(logits, top_k, renormalize=False)
        results += zip(fast_moe.choose_experts(logits, top_k, renormalize=False), plain, strict=True)
        got = fast_moe.mixture(x, *expected, *halves, num_experts)
        results.append((got, moe.mixture(x, *expected, *halves, num_experts)))
    return results


def draw(dtype: torch.dtype, *, noisy: bool) -> Results:
    seeds = torch.tensor([0, 1, -1, 1 << 62, -(1 << 63), 12345])
    positions = torch.tensor([0, 7, 1 << 40, 3, 2, 99])
    hashes = noise.hash_tokens(5000)
    reference = noise.gumbel_noise if noisy else noise.uniform
    return [(sampling.draw(seeds, positions, 5000, noise=noisy), reference(seeds, positions, hashes))]


def sample(dtype: torch.dtype) -> Results:
    results = []
    for num_rows, vocab_size in ((9, 5000), (3, 100), (0, 50)):
        x = rand(num_rows, vocab_size, dtype=torch.float32)
        x[:, ::3] = -torch.inf
        drawn = torch.arange(num_rows) % 3 > 0
        seeds, positions = torch.arange(num_rows) * 77, torch.arange(num_rows) + 5
        noisy = x + noise.gumbel_noise(seeds, positions, noise.hash_tokens(vocab_size))
        expected = torch.where(drawn[:, None], noisy, x).argmax(dim=1)
        results.append((sampling.gumbel_argmax(x, drawn, seeds, positions), expected))
    return results


def stage(dtype: torch.dtype) -> Results:
    """Empty writes, long ones, and some over one another."""
    rows, starts = [2, 2, 2, 0, 5, 4, 4], [0, 3, 4, 1, 0, 0, 20]
    counts = [6, 4, 3, 0, 600, 300, 1]
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    values = torch.arange(1, int(offsets[-1]) + 1, dtype=torch.int32)
    got, expected = torch.zeros(2, 6, 640, dtype=torch.int32)
    where = (torch.tensor(rows, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32))
    scatter.scatter_ranges(got, *where, offsets, values)
    staging.scatter_ranges(expected, *where, offsets, values)
    none = torch.empty(0, dtype=torch.int32)
    scatter.scatter_ranges(got, none, none, offsets[:1], values)
    return [(got, expected)]


DECODES = [(0, 1), (16, 1), (300, 1), (63, 1)]
PREFILLS = [(0, 70), (33, 5), (7, 64), (1, 2)]
MIXED = [(40, 1), (0, 1), (9, 33), (0, 2), (130, 40)]
SHAPES = {"decode": DECODES, "prefill": PREFILLS, "mixed": MIXED}
HEADS = {"9/3 heads of 64": (9, 3, 64), "4/1 of 128": (4, 1, 128), "2/2 of 256": (2, 2, 256), "6/2 of 80": (6, 2, 80)}
FLOAT32, INT32 = (torch.float32,), (torch.int32,)

CASES: list[Case] = [
    *(
        Case(f"attention, {kind}, {text}", partial(attend, shapes=shapes, heads=heads, block_size=block_size))
        for kind, shapes in SHAPES.items()
        for (text, heads), block_size in zip(HEADS.items(), (16, 4, 32, 13), strict=True)
    ),
    Case("KV write by slot", write),
    Case("RMSNorm, with and without residual", normalize),
    Case("rotary", turn),
    Case("SwiGLU", gate),
    *(Case(f"product, {layout}", partial(multiply, layout=layout)) for layout in products.LAYOUTS),
    Case("activations to e4m3", quantize),
    *(
        Case(
            f"e4m3 × e4m3{'' if native else ' in bfloat16'}, {layout}",
            partial(multiply_scaled, layout=layout, native=native),
            min_capability=89 if native else 80,
        )
        for layout in products.SCALED_LAYOUTS
        for native in (True, False)
    ),
    *(
        Case(f"mixture of experts, {layout}", partial(mix_experts, layout=layout, top_k=k))
        for layout, k in (("dense", 2), ("fp8_per_tensor", 1), ("mxfp4", 4), ("int8_per_channel", 3))
    ),
    *(
        Case(
            f"mixture of experts, dense {name}",
            partial(mix_experts, layout="dense", top_k=2, stored=stored),
            (dtype,),
        )
        for name, stored, dtype in (
            ("bfloat16 in float32", torch.bfloat16, torch.float32),
            ("float32 in bfloat16", torch.float32, torch.bfloat16),
        )
    ),
    Case("uniform numbers", partial(draw, noisy=False), FLOAT32),
    Case("Gumbel noise", partial(draw, noisy=True), FLOAT32),
    Case("sampling", sample, FLOAT32),
    Case("staged scatter", stage, INT32),
]
