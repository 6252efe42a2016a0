"""Norm, rotary embedding and SwiGLU on GPUs. References: kernels/norm.py, kernels/rotary.py, kernels/activation.py.

Every step that the reference rounds to the activations' dtype is rounded here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, num_cols, x_stride, residual_stride, out_stride, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    dtype = x.dtype.element_ty
    values = tl.load(x + token * x_stride + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        at = residual + token * residual_stride + cols
        values = (values.to(tl.float32) + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_cols + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    weights = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + cols, (normed * weights).to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The norm of x, or of x + residual, which is then stored in `residual`: dtype[num_tokens, hidden_size].

    x, residual: dtype[num_tokens, hidden_size], elements of a row adjacent; weight: dtype[hidden_size].
    Equals norm.rms_norm and norm.add_rms_norm.
    """
    num_tokens, num_cols = x.shape
    out = torch.empty(num_tokens, num_cols, dtype=x.dtype, device=x.device)
    if num_tokens:
        block = triton.next_power_of_2(num_cols)
        added = x if residual is None else residual
        rms_norm_kernel[(num_tokens,)](
            x, added, weight, out, num_cols, x.stride(0), added.stride(0), out.stride(0), eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


@triton.jit
def rotary_kernel(
    x, cos, sin, num_heads, half, token_stride, head_stride, angle_stride,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < num_heads)[:, None] & (dims < half)[None, :]
    dtype = x.dtype.element_ty
    c = tl.load(cos + token * angle_stride + dims, mask=dims < half, other=0.0).to(dtype).to(tl.float32)[None, :]
    s = tl.load(sin + token * angle_stride + dims, mask=dims < half, other=0.0).to(dtype).to(tl.float32)[None, :]
    at = x + token * token_stride + heads[:, None] * head_stride + dims[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    turned = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    other = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    tl.store(at, turned.to(dtype), mask=mask)
    tl.store(at + half, other.to(dtype), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """rotary.apply_rotary, in place.

    x: dtype[num_tokens, num_heads, head_dim], elements of a head adjacent; cos, sin: float32[num_tokens, head_dim/2].
    """
    num_tokens, num_heads, head_dim = x.shape
    if not num_tokens:
        return
    block_h = min(8, triton.next_power_of_2(num_heads))
    rotary_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        x, cos, sin, num_heads, head_dim // 2, x.stride(0), x.stride(1), cos.stride(0),
        BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(head_dim // 2), num_warps=2,
    )  # fmt: skip


@triton.jit
def swiglu_kernel(gate, up, out, num_cols, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    dtype = out.dtype.element_ty
    g = tl.load(gate + token * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + token * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out + token * out_stride + cols, (silu * u).to(dtype), mask=mask)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """activation.swiglu. gate, up: dtype[num_tokens, intermediate_size], elements of a row adjacent."""
    num_tokens, num_cols = gate.shape
    out = torch.empty(num_tokens, num_cols, dtype=gate.dtype, device=gate.device)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(num_cols))
        swiglu_kernel[(num_tokens, triton.cdiv(num_cols, block))](
            gate, up, out, num_cols, gate.stride(0), up.stride(0), out.stride(0), BLOCK=block
        )
    return out
