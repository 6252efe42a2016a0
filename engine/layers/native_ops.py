"""The decoder's operations in native code, fused: float32 on CPUs.

Owns the translation of weights, caches and batches to the C structures of native/library.py, done once per weight
and once per step. Results are the same bits for a token whatever batch it is in and whatever the number of threads,
unless products are in bfloat16: then those of a few tokens are exact, and others are not.
What the kernels do not cover (a head_dim that is no multiple of 16, float16 activations, layouts made for GPUs) is
left to TorchOps, and `describe` says so. Weights are read where they are mapped; nothing is copied or written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from preload.engine.errors import RequestError
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.native.library import (
    HOLDS_GIL_TOKENS,
    LAYOUT_IDS,
    AttentionStepStruct,
    LinearPartStruct,
    NativeLibrary,
    WeightStruct,
)
from preload.engine.kernels.staging import scatter_ranges
from preload.engine.quantization.layouts import DENSE

from .linear import Linear, product
from .native_layers import NativeLayers
from .native_mixture import native_mixture
from .native_sampling import NativeSampling
from .ops import (
    AddedProjection,
    Attention,
    Choose,
    Experts,
    Heads,
    Layer,
    LayerCache,
    Layers,
    Norm,
    Ops,
    Projection,
    Rotation,
    Scatter,
    TorchOps,
    check_cache_dtype,
    one_by_one,
)
from .weights import Weight

_UNIT_NAMES = {"integers": "VNNI", "tiles": "AMX"}


def native_ops(library: NativeLibrary, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> Ops:
    """The fastest operations for a compute dtype. Other dtypes than float32 get native products only.

    `kv_cache_dtype` as the core's configuration says. Raises RequestError if this machine has no kernels for it."""
    width = "AVX-512" if library.has_wide_vectors else "8-lane"
    units = "".join(f" and {name}" for unit, name in _UNIT_NAMES.items() if unit in library.units)
    note = f"native {width}{units} kernels on {library.num_threads} threads ({library.path.name})"
    if "bfloat16" in library.units:
        note += f", products of more than {library.exact_tokens} tokens in bfloat16"
    if dtype == torch.float32:
        return NativeOps(library, note, kv_cache_dtype)
    check_cache_dtype(kv_cache_dtype, dtype)
    ops = NativeProductOps(NativeProducts(library), f"products by {note}, the rest by torch in {dtype}")
    ops.choose = NativeSampling(library)
    return ops


class NativeOps:
    """All operations of float32 activations."""

    def __init__(self, library: NativeLibrary, note: str, kv_cache_dtype: str = "auto") -> None:
        if kv_cache_dtype == "bfloat16" and "bfloat16" not in library.available_units:
            raise RequestError(
                "kv_cache_dtype is bfloat16, but this CPU has neither AVX-512 BF16 nor AMX to multiply it"
            )
        self._kv_cache_dtype = kv_cache_dtype
        self.choose: Choose | None = NativeSampling(library)
        self._library = library
        self._note = note
        self._torch_attention = ""
        self._by_torch: set[str] = set()
        self.scatter: Scatter = scatter_ranges
        self._steps = StepStructs()

    def describe(self) -> str:
        return self._note + self._torch_attention + by_torch_note(self._by_torch)

    def projection(self, linears: Sequence[Linear], norm: Norm | None = None) -> Projection:
        if not self._covers(*linears):
            return TorchOps().projection(linears, norm)
        num_rows = sum(linear.weight.num_rows for linear in linears)
        return NativeLinear(self._library, linears, num_rows, norm=norm)

    def added_projection(self, linear: Linear) -> AddedProjection:
        if not self._covers(linear):
            return TorchOps().added_projection(linear)
        return NativeLinear(self._library, [linear], linear.weight.num_rows)

    def gated_projection(self, gate: Linear, up: Linear, norm: Norm) -> Projection:
        if not self._covers(gate, up):
            return TorchOps().gated_projection(gate, up, norm)
        return NativeLinear(self._library, [gate, up], gate.weight.num_rows, norm=norm, swiglu=True)

    def attention(self, heads: Heads) -> Attention:
        if heads.head_dim % 16:
            self._torch_attention = f"; attention by torch, because head_dim {heads.head_dim} is no multiple of 16"
            return TorchOps().attention(heads)
        return NativeAttention(self._library, heads, self._steps)

    def cache_dtype(self, heads: Heads) -> torch.dtype:
        """Raises RequestError for bfloat16 that was asked for by name, and that a model's heads do not allow."""
        fits = heads.head_dim % 32 == 0
        if self._kv_cache_dtype == "bfloat16" and not fits:
            raise RequestError(f"kv_cache_dtype is bfloat16, and head_dim {heads.head_dim} is no multiple of 32")
        rounds = self._kv_cache_dtype == "bfloat16" or (
            self._kv_cache_dtype == "auto" and "bfloat16" in self._library.units
        )
        return torch.bfloat16 if rounds and fits else torch.float32

    def mixture(self, experts: Experts, norm: Norm) -> Projection:
        if not self._covers(experts.router, Linear(experts.gate_up), Linear(experts.down)):
            return TorchOps().mixture(experts, norm)

        def make(linears: Sequence[Linear], is_gated: bool) -> Projection:
            return NativeLinear(self._library, linears, linears[0].weight.num_rows, swiglu=is_gated)

        router = NativeLinear(self._library, [experts.router], experts.count, is_exact=True)
        return native_mixture(experts, router, norm, make)

    def layers(self, layers: Sequence[Layer]) -> Layers:
        parts = [layer.operations() for layer in layers]
        if not all(_is_native(operations) for operations in parts):
            return one_by_one(layers)
        return NativeLayers(self._library, parts)

    def _covers(self, *linears: Linear) -> bool:
        """Whether all of these are the kernels' to multiply; what is not is noted."""
        left = {linear.weight.layout for linear in linears if layout_name(linear.weight) not in LAYOUT_IDS}
        self._by_torch |= left
        return not left


class NativeProductOps(TorchOps):
    """Torch's operations with native products; `describe` tells whose products are torch's too."""

    def __init__(self, products: NativeProducts, note: str) -> None:
        super().__init__(products, note)
        self._products = products

    def projection(self, linears: Sequence[Linear], norm: Norm | None = None) -> Projection:
        self._products.note(*linears)
        return super().projection(linears, norm)

    def added_projection(self, linear: Linear) -> AddedProjection:
        self._products.note(linear)
        return super().added_projection(linear)

    def gated_projection(self, gate: Linear, up: Linear, norm: Norm) -> Projection:
        self._products.note(gate, up)
        return super().gated_projection(gate, up, norm)

    def describe(self) -> str:
        return super().describe() + by_torch_note(self._products.by_torch)


def by_torch_note(layouts: set[str]) -> str:
    return f"; products of {', '.join(sorted(layouts))} by torch" if layouts else ""


class NativeLinear:
    """One fused linear operation: norm, products, bias, SwiGLU or residual. See native/linear_call.h."""

    def __init__(
        self,
        library: NativeLibrary,
        linears: Sequence[Linear],
        num_rows: int,
        *,
        norm: Norm | None = None,
        swiglu: bool = False,
        is_exact: bool = False,
    ) -> None:
        self._holding, self._releasing = library.linear, library.linear_without_gil
        self._session = library.session
        self._num_cols = linears[0].weight.num_cols
        self._num_rows = num_rows
        self._structs = (WeightStruct * len(linears))(*(weight_struct(li.weight, li.bias) for li in linears))
        self._weights, self._num_weights = ctypes.addressof(self._structs), len(linears)
        self._owned = (list(linears), norm)  # the structures point into these
        self._norm = _address(norm.weight) if norm else None
        self._eps = norm.eps if norm else 0.0
        self._swiglu, self._is_exact = int(swiglu), int(is_exact)

    def part(self) -> LinearPartStruct:
        """The operation as a layer's part; what it points into lives as long as this object."""
        return LinearPartStruct(self._weights, self._num_weights, self._norm, self._eps, self._swiglu)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: float32[num_tokens, num_cols]; residual: float32[num_tokens, num_rows], contiguous, overwritten with
        the result. Returns float32[num_tokens, num_rows]."""
        if x.dtype != torch.float32 or x.shape[1] != self._num_cols:
            raise AssertionError(f"x is {x.dtype}{list(x.shape)}; this product needs float32[n, {self._num_cols}]")
        if x.stride(1) != 1:
            x = x.contiguous()
        num_tokens = x.shape[0]
        out = torch.empty(num_tokens, self._num_rows) if residual is None else residual
        call = self._holding if num_tokens <= HOLDS_GIL_TOKENS else self._releasing
        call(
            self._session, self._weights, self._num_weights, x.data_ptr(), x.stride(0), num_tokens,
            self._norm, self._eps, self._swiglu, None if residual is None else residual.data_ptr(), out.data_ptr(),
            self._is_exact,
        )  # fmt: skip
        return out


class NativeProducts:
    """x · weightᵀ in x's dtype, computed in float32 by the native kernels."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._by_weight: dict[int, NativeLinear] = {}
        self.by_torch: set[str] = set()

    def note(self, *linears: Linear) -> None:
        """Notes those that are not the kernels' to multiply."""
        self.by_torch |= {li.weight.layout for li in linears if layout_name(li.weight) not in LAYOUT_IDS}

    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        if weight.layout in self.by_torch:
            return product(x, weight)
        linear = self._by_weight.get(id(weight))
        if linear is None:
            linear = NativeLinear(self._library, [Linear(weight)], weight.num_rows)
            self._by_weight[id(weight)] = linear
        return linear(x.float()).to(x.dtype)


class StepStructs:
    """The C structure of the latest batch: built by the first layer of a step, shared by the others."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._struct = AttentionStepStruct()
        self._owned: tuple[Tensor, ...] = ()  # what the structure points into

    def address(self, heads: Heads, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> int:
        keys, values = cache
        # A head of one layer has a cache of its own.
        key = batch, heads, keys.shape[1], keys.stride(0), keys.dtype
        if len(self._key) != len(key) or batch is not self._key[0] or self._key[1:] != key[1:]:
            _check_cache(keys, values, heads.head_dim)
            cos, sin = (part.contiguous() for part in rotation)
            starts, lengths = batch.query_start_loc.contiguous(), batch.seq_lens.contiguous()
            table = batch.block_table if batch.block_table.stride(1) == 1 else batch.block_table.contiguous()
            slots = batch.slot_mapping.contiguous()
            self._owned = (cos, sin, starts, lengths, table, slots)
            self._struct = AttentionStepStruct(
                *(_address(tensor) for tensor in self._owned),
                table.stride(0), lengths.shape[0], slots.shape[0],
                heads.num_heads, heads.num_kv_heads, heads.head_dim, keys.shape[1], keys.stride(0),
                keys.dtype == torch.bfloat16,
            )  # fmt: skip
            self._key = key
        return ctypes.addressof(self._struct)


def _check_cache(keys: Tensor, values: Tensor, head_dim: int) -> None:
    if keys.dtype != torch.float32 and (keys.dtype != torch.bfloat16 or head_dim % 32):
        raise AssertionError(
            f"keys and values in {keys.dtype}, head_dim {head_dim}: no native kernel attends to them"
        )
    if keys.shape[1] % 16:
        raise AssertionError(f"blocks of {keys.shape[1]} tokens; the native kernels need whole vectors of 16")
    if keys.stride() != values.stride() or not keys[0].is_contiguous():
        raise AssertionError(
            f"keys lie {keys.stride()}, values {values.stride()}; blocks must lie alike, and in one piece"
        )


class NativeAttention:
    """Rotary embedding, KV write and attention in one call. See native/attention.h."""

    def __init__(self, library: NativeLibrary, heads: Heads, steps: StepStructs) -> None:
        self._holding, self._releasing = library.attention, library.attention_without_gil
        self._session = library.session
        self._heads = heads
        self._steps = steps
        self._num_rows = heads.num_heads * heads.head_dim

    def step(self, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> int:
        """Address of the batch's structure, which lives until the next batch."""
        return self._steps.address(self._heads, rotation, cache, batch)

    def __call__(self, qkv: Tensor, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> Tensor:
        keys, values = cache
        num_tokens = qkv.shape[0]
        step = self.step(rotation, cache, batch)
        out = torch.empty(num_tokens, self._num_rows)
        call = self._holding if num_tokens <= HOLDS_GIL_TOKENS else self._releasing
        call(self._session, step, qkv.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr())
        return out


def _is_native(operations: Sequence[object]) -> bool:
    kinds = (NativeLinear, NativeAttention, NativeLinear, NativeLinear, NativeLinear)
    return tuple(map(type, operations)) == kinds


def weight_struct(weight: Weight, bias: Tensor | None = None) -> WeightStruct:
    """`Weight` of layouts.h. Raises AssertionError for a weight whose rows are not contiguous."""
    data = weight.parts["weight"]
    if any(not part.is_contiguous() for part in weight.parts.values()):
        raise AssertionError(f"{weight.name}: the native kernels read contiguous rows")
    return WeightStruct(
        data.data_ptr(),
        _address(weight.parts.get("scale")),
        _address(weight.parts.get("min")),
        _address(bias),
        weight.num_rows, weight.num_cols, data.stride(0) * data.element_size(), LAYOUT_IDS[layout_name(weight)],
    )  # fmt: skip


def layout_name(weight: Weight) -> str:
    """As LAYOUT_IDS names it: a dense weight's dtype is part of it."""
    if weight.layout != DENSE:
        return weight.layout
    return f"{DENSE}.{str(weight.parts['weight'].dtype).removeprefix('torch.')}"


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
