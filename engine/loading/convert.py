"""Conversions of stored rows into resident parts.

The only module of the loader that needs torch; it is imported when a recipe converts something, since importing
torch takes longer than many loads. Works on pieces of rows, so that memory stays bounded by the piece, not by the
tensor. Owns no file and no segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from preload.engine.quantization import dequantize, int4_group32, int8_per_channel

from .files import fault
from .steps import Step

_QUANTIZERS = {
    int8_per_channel.LAYOUT: (int8_per_channel.quantize, ("weight", "scale")),
    int4_group32.LAYOUT: (int4_group32.quantize, ("weight", "scale", "min")),
}


def use_one_thread() -> None:
    """The loader's own threads work side by side; torch's would only compete with them."""
    torch.set_num_threads(1)


def convert_rows(step: Step, stored: bytearray | memoryview, num_rows: int) -> list[memoryview]:
    """The bytes of each target of `step` for `num_rows` rows whose stored bytes are given, in order of targets.

    Rows stored permuted must come as whole heads. Raises CheckpointError for a value that cannot be quantized.
    """
    rows = _read_rows(step, stored, num_rows)
    if step.permuted_head_dim:
        rows = _unpermute(rows, step.permuted_head_dim)
    layout = step.targets[0].layout
    if layout not in _QUANTIZERS:
        return [_bytes(rows.to(getattr(torch, step.targets[0].dtype)))]
    rows = rows.float()
    if not bool(torch.isfinite(rows).all()):
        raise fault(
            step.source.file.path,
            f"holds values that are not finite and cannot be quantized to {layout}; choose bf16 or f32",
            step.source.name,
        )
    quantize, parts = _QUANTIZERS[layout]
    quantized = quantize(rows)
    return [_bytes(quantized[part]) for part in parts]


def _read_rows(step: Step, stored: bytearray | memoryview, num_rows: int) -> Tensor:
    """Stored bytes → [num_rows, cols] (a vector is one column); GGUF blocks become float32."""
    dtype = step.source.dtype
    if dtype.startswith("gguf."):
        blocks = torch.frombuffer(stored, dtype=torch.uint8).view(num_rows, -1)
        return dequantize(dtype, {"weight": blocks})
    return torch.frombuffer(stored, dtype=getattr(torch, dtype)).view(num_rows, -1)


def _unpermute(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads, [heads · head_dim, cols], from interleaved halves to one half after the other."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")
