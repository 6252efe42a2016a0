"""The choice of tokens in native code: greedy, or drawn after temperature, min-p, top-k and top-p.

Owns the translation of a step's parameters to the C structure of native/sampling.h. engine/core/sampler.py says what
is chosen; this finds the same tokens without a tensor of noise or of truncated logits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from preload.engine.kernels.native.library import NativeLibrary, SamplingCallStruct

_HOLDS_GIL_ROWS = 4
"""Calls of at most this many rows take microseconds, see library.HOLDS_GIL_TOKENS."""


class NativeSampling:
    """`Choose` of ops.py."""

    def __init__(self, library: NativeLibrary) -> None:
        self._holding, self._releasing = library.sample, library.sample_without_gil
        self._session = library.session

    def __call__(
        self, logits: Tensor, *, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor,
        positions: Tensor, token_hashes: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        num_rows, num_tokens = logits.shape
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            logits = logits.float().contiguous()
        log_min_p = min_p.log()
        largest, tokens = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        call = SamplingCallStruct(
            logits.data_ptr(), logits.stride(0), num_rows, num_tokens,
            *(t.data_ptr() for t in (temperature, log_min_p, top_p, top_k, seeds, positions, token_hashes)),
            largest.data_ptr(), tokens.data_ptr(),
        )  # fmt: skip
        (self._holding if num_rows <= _HOLDS_GIL_ROWS else self._releasing)(self._session, ctypes.addressof(call))
        return largest, tokens
