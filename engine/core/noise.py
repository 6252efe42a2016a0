"""Counter-based randomness: a function of (seed, position, token) and of nothing else.

No generator holds state, so a request continued by another core, or sharing a step with others, draws what it
would have drawn. The hash is built from two published mixers, in wrapping integer tensor arithmetic:

    key(seed, position) = splitmix64(splitmix64(seed) + position)         split into (low, high), 32 bits each
    h(key, token)       = fmix32(fmix32(fmix32(token + 1) ^ low) + high)
    u                   = (h mod 2³¹) / 2³¹, clamped to [4.66e-10, 1 − 2⁻²⁴]

Sources: splitmix64 from Steele, Lea, Flood, OOPSLA 2014 (constants of Vigna's public-domain version); fmix32 is
the finalizer of Appleby's public-domain MurmurHash3. The upper clamp keeps log1p(−u) finite in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_UNIFORM = 4.66e-10
MAX_UNIFORM = 1.0 - 2.0**-24
_NUMBERS_AT_ONCE = 1 << 18
"""So many that their thirty passes stay in a CPU's cache."""


def gumbel_noise(seeds: Tensor, positions: Tensor, token_hashes: Tensor) -> Tensor:
    """−log(−log1p(−u)): float32[num_rows, vocab_size].

    seeds, positions: int64[num_rows], a seed being the two's complement of its 64 bits;
    token_hashes: int32[vocab_size] of `hash_tokens`. Source: Gumbel-max, arXiv 1411.0030.
    """
    num_rows = max(1, _NUMBERS_AT_ONCE // len(token_hashes))
    if len(seeds) > num_rows:
        parts = [slice(i, i + num_rows) for i in range(0, len(seeds), num_rows)]
        return torch.cat([gumbel_noise(seeds[part], positions[part], token_hashes) for part in parts])
    u = uniform(seeds, positions, token_hashes)
    return u.neg_().log1p_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, token_hashes: Tensor) -> Tensor:
    """u: float32[num_rows, vocab_size], arguments as of `gumbel_noise`."""
    key = _splitmix64(_splitmix64(seeds) + positions)
    low = _to_int32(key & 0xFFFFFFFF)
    high = _to_int32((key >> 32) & 0xFFFFFFFF)
    h = _fmix32(token_hashes ^ low[:, None])
    h = _fmix32(h.add_(high[:, None]))
    return h.bitwise_and_(0x7FFFFFFF).float().mul_(2.0**-31).clamp_(MIN_UNIFORM, MAX_UNIFORM)


def derive_seeds(seeds: Tensor, purpose: int, starts: Tensor) -> Tensor:
    """Other seeds, for randomness that must not depend on what the seeds themselves give: int64[num_rows].

    seeds, starts: int64[num_rows]. The same for equal seeds, purpose and start, and else unrelated:
    splitmix64(splitmix64(seed + (purpose + 1) · 2⁶²) + start), wrapping, for purposes 0 … 2.
    """
    return _splitmix64(_splitmix64(seeds + seed_to_int64(((purpose + 1) << 62) & ((1 << 64) - 1))) + starts)


def hash_tokens(vocab_size: int) -> Tensor:
    """fmix32(token + 1) of every token: int32[vocab_size]."""
    return _fmix32(torch.arange(1, vocab_size + 1, dtype=torch.int32))


def seed_to_int64(seed: int) -> int:
    """The two's complement reading of an unsigned 64-bit seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _splitmix64(x: Tensor) -> Tensor:
    """One output of splitmix64 for the state x: int64[n], wrapping."""
    x = x + seed_to_int64(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30, 64)) * seed_to_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27, 64)) * seed_to_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31, 64)


def _fmix32(h: Tensor) -> Tensor:
    """int32, wrapping; changes and returns h."""
    h ^= _shift_right(h, 16, 32)
    h *= 0x85EBCA6B - (1 << 32)
    h ^= _shift_right(h, 13, 32)
    h *= 0xC2B2AE35 - (1 << 32)
    h ^= _shift_right(h, 16, 32)
    return h


def _shift_right(x: Tensor, count: int, num_bits: int) -> Tensor:
    """Logical shift of a signed tensor: the arithmetic one with the copies of the sign masked off."""
    return (x >> count).bitwise_and_((1 << (num_bits - count)) - 1)


def _to_int32(x: Tensor) -> Tensor:
    """The two's complement reading of 32-bit numbers held in int64."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).int()
