"""Sampling on GPUs: the token of the largest logit plus Gumbel noise. Reference: engine/core/noise.py.

u of (seed, position, token) has the same bits as there. The noise is the same formula in the device's logarithm,
whose last bits no two libraries agree on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
MIN_UNIFORM = tl.constexpr(4.66e-10)
MAX_UNIFORM = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _splitmix64(x):
    """uint64 → uint64, wrapping."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _fmix32(h):
    """uint32[...] → uint32[...], wrapping."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def uniform(seed, position, tokens):
    """noise.uniform: float32[n]. seed, position: int64; tokens: int32[n]."""
    key = _splitmix64(_splitmix64(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True))
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    h = _fmix32((tokens + 1).to(tl.uint32, bitcast=True))
    h = _fmix32(_fmix32(h ^ low) + high)
    u = (h & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * (2.0**-31)
    return tl.minimum(tl.maximum(u, MIN_UNIFORM), MAX_UNIFORM)


@triton.jit
def gumbel(u):
    """−log(−log1p(−u)): float32[n]. log1p(x) = log(w) · x / (w − 1) with w = 1 + x, which cancels w's rounding."""
    w = 1.0 - u
    small = w == 1.0
    minus_log1p = tl.where(small, u, tl.log(w) * (u / tl.where(small, 1.0, w - 1.0)))
    return -tl.log(minus_log1p)


@triton.jit
def uniform_kernel(seeds, positions, out, vocab_size, out_stride, NOISE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    u = uniform(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(out + row * out_stride + tokens, gumbel(u) if NOISE else u, mask=tokens < vocab_size)


def draw(seeds: Tensor, positions: Tensor, vocab_size: int, *, noise: bool) -> Tensor:
    """noise.gumbel_noise, or noise.uniform: float32[num_rows, vocab_size]. seeds, positions: int64[num_rows]."""
    num_rows = seeds.shape[0]
    out = torch.empty(num_rows, vocab_size, device=seeds.device)
    if num_rows:
        uniform_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            seeds, positions, out, vocab_size, out.stride(0), NOISE=noise, BLOCK=BLOCK
        )
    return out


@triton.jit
def gumbel_argmax_kernel(x, drawn, seeds, positions, best, best_tokens, vocab_size, x_stride, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    values = tl.load(x + row * x_stride + tokens, mask=mask, other=float("-inf"))
    if tl.load(drawn + row):
        values += gumbel(uniform(tl.load(seeds + row), tl.load(positions + row), tokens))
        values = tl.where(mask, values, float("-inf"))
    at = row * tl.num_programs(1) + tile
    index = tl.argmax(values, axis=0)
    tl.store(best + at, tl.max(values, axis=0))
    tl.store(best_tokens + at, (tile * BLOCK + index).to(tl.int64))


def gumbel_argmax(x: Tensor, drawn: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The token of the largest x, plus Gumbel noise in rows that are drawn: int64[num_rows]. Of equals the first.

    x: float32[num_rows, vocab_size], scaled by temperature, −inf where truncated, elements of a row adjacent;
    drawn: bool[num_rows]; seeds, positions: int64[num_rows].
    """
    num_rows, vocab_size = x.shape
    num_tiles = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty(num_rows, num_tiles, device=x.device)
    tokens = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=x.device)
    if num_rows:
        gumbel_argmax_kernel[(num_rows, num_tiles)](
            x, drawn, seeds, positions, best, tokens, vocab_size, x.stride(0), BLOCK=BLOCK
        )
    return tokens.gather(1, best.argmax(dim=1, keepdim=True)).flatten()
