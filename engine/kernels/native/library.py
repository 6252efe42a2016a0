"""The native kernels as Python calls them: ctypes structures and functions.

Owns the C interface of kernels.cpp and the threads behind it; knows nothing of layers. Pointers are addresses of
tensors' data, which the caller keeps alive during a call, and weights as long as their structure.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from .build import KernelsUnavailableError

LAYOUT_IDS: dict[str, int] = {
    "dense.float32": 0, "dense.bfloat16": 1, "dense.float16": 2,
    "gguf.q4_0": 3, "gguf.q4_1": 4, "gguf.q5_0": 5, "gguf.q5_1": 6, "gguf.q8_0": 7,
    "gguf.q4_k": 8, "gguf.q5_k": 9, "gguf.q6_k": 10,
    "int8_per_channel": 11, "int4_group32": 12,
}  # fmt: skip
"""Numbers of layouts.h. A dense weight's dtype is part of its name here."""

UNITS: dict[str, int] = {"integers": 1, "tiles": 2, "bfloat16": 4}
"""Units of the CPU beyond vectors of floats, `Units` of linear_call.h: AVX-512 VNNI, AMX, and products of bfloat16,
by AMX or else by AVX-512 BF16. Without integers a product's last bits differ, without tiles it only takes longer.
With bfloat16 products of more than `exact_tokens` tokens are rounded to that."""

EXACT_UNITS = ("integers", "tiles")

HOLDS_GIL_TOKENS = 8
"""Calls of at most this many tokens take microseconds and keep the interpreter's lock: giving it up and taking it
back costs as much, hundreds of times per step. Longer ones let the process's other threads run."""


class WeightStruct(ctypes.Structure):
    """`Weight` of layouts.h."""

    _fields_ = [
        ("data", c_void_p), ("scale", c_void_p), ("minimum", c_void_p), ("bias", c_void_p),
        ("num_rows", c_int64), ("num_cols", c_int64), ("row_bytes", c_int64), ("layout", c_int32),
    ]  # fmt: skip


class AttentionStepStruct(ctypes.Structure):
    """`AttentionStep` of attention_step.h."""

    _fields_ = [
        ("cos", c_void_p), ("sin", c_void_p), ("query_start_loc", c_void_p), ("seq_lens", c_void_p),
        ("block_table", c_void_p), ("slot_mapping", c_void_p),
        ("table_stride", c_int64), ("num_requests", c_int64), ("num_tokens", c_int64),
        ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("block_size", c_int64),
        ("block_stride", c_int64), ("is_brief", c_int32),
    ]  # fmt: skip


class LinearPartStruct(ctypes.Structure):
    """`LinearPart` of layers.h."""

    _fields_ = [
        ("weights", c_void_p), ("num_weights", c_int64), ("norm_weight", c_void_p), ("eps", c_float),
        ("swiglu", c_int32),
    ]  # fmt: skip


class DecoderLayerStruct(ctypes.Structure):
    """`DecoderLayer` of layers.h."""

    _fields_ = [
        ("qkv", LinearPartStruct), ("o", LinearPartStruct), ("gated", LinearPartStruct), ("down", LinearPartStruct),
        ("keys", c_void_p), ("values", c_void_p),
    ]  # fmt: skip


class SamplingCallStruct(ctypes.Structure):
    """`SamplingCall` of sampling.h."""

    _fields_ = [
        ("logits", c_void_p), ("stride", c_int64), ("num_rows", c_int64), ("num_tokens", c_int64),
        ("temperature", c_void_p), ("log_min_p", c_void_p), ("top_p", c_void_p),
        ("top_k", c_void_p), ("seeds", c_void_p), ("positions", c_void_p), ("token_hashes", c_void_p),
        ("largest", c_void_p), ("tokens", c_void_p),
    ]  # fmt: skip


_ATTENTION_TYPES = (c_void_p,) * 6
_LINEAR_TYPES = (
    c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_float, c_int32, c_void_p, c_void_p, c_int32
)  # fmt: skip


class NativeLibrary:
    """A loaded shared object and its threads. Lives as long as the process: code is never unloaded.

    `allowed_units`: which of UNITS it uses where the machine has them. Raises KernelsUnavailableError if the file
    cannot be loaded."""

    def __init__(self, path: Path, num_threads: int, allowed_units: Collection[str] = EXACT_UNITS) -> None:
        self.path = path
        self.num_threads = num_threads
        try:
            holding, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailableError(f"cannot load {path}: {error}") from error
        holding.preload_open.restype = c_void_p
        holding.preload_exact_tokens.restype = c_int64
        self.has_wide_vectors = bool(holding.preload_has_wide_vectors())
        available = holding.preload_available_units()
        self.available_units = frozenset(name for name, unit in UNITS.items() if available & unit)
        self.units = self.available_units.intersection(allowed_units)
        self.session = c_void_p(holding.preload_open(num_threads, sum(UNITS[name] for name in self.units)))
        self.exact_tokens: int = holding.preload_exact_tokens(self.session)
        for library in (holding, releasing):
            library.preload_linear.argtypes = _LINEAR_TYPES
            library.preload_linear.restype = None
            library.preload_attention.argtypes = _ATTENTION_TYPES
            library.preload_attention.restype = None
            library.preload_layers.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p)
            library.preload_layers.restype = None
            library.preload_sample.argtypes = (c_void_p, c_void_p)
            library.preload_sample.restype = None
        self.linear, self.linear_without_gil = holding.preload_linear, releasing.preload_linear
        self.attention, self.attention_without_gil = holding.preload_attention, releasing.preload_attention
        self.layers = releasing.preload_layers
        self.sample, self.sample_without_gil = holding.preload_sample, releasing.preload_sample
