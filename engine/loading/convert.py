"""Conversions of stored rows into resident parts.

Imported when a recipe converts something, since importing torch takes longer than many loads. Works on pieces of
rows, so that memory stays bounded by the piece, not by the tensor: `convert_rows` and `largest` on the host,
`parts_of` and `magnitude_of` wherever the stored bytes are, without waiting there. Owns no file and no segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from preload.engine.errors import CheckpointError
from preload.engine.quantization import (
    dequantize,
    fp8_per_block,
    fp8_per_tensor,
    int4_group32,
    int8_per_channel,
    mxfp4,
    mxfp8,
    nvfp4,
)

from .files import fault
from .resident_parts import NEED_AMAX
from .steps import Step
from .unpack import unpack

_QUANTIZERS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    int8_per_channel.LAYOUT: int8_per_channel.quantize,
    int4_group32.LAYOUT: int4_group32.quantize,
    fp8_per_block.LAYOUT: fp8_per_block.quantize,
    mxfp8.LAYOUT: mxfp8.quantize,
    mxfp4.LAYOUT: mxfp4.quantize,
}


def use_one_thread() -> None:
    """The loader's own threads work side by side; torch's would only compete with them."""
    torch.set_num_threads(1)


def convert_rows(
    step: Step, stored: bytearray | memoryview, num_rows: int, amax: float = 0.0, *, is_first: bool = True
) -> list[memoryview]:
    """The bytes of each target of `step` for `num_rows` rows whose stored bytes are given, in order of targets.

    Rows stored permuted must come as whole heads, and rows of fp8_per_block as whole blocks. `amax`: the largest
    magnitude of the whole weight, for layouts that need it; what there is once for a weight comes with its first
    rows. Raises CheckpointError for a value that cannot be quantized.
    """
    parts, are_finite = parts_of(step, torch.frombuffer(stored, dtype=torch.uint8), num_rows, amax, is_first=is_first)
    if not bool(are_finite):
        raise not_finite(step)
    return [part.numpy().data.cast("B") for part in parts]


def largest(step: Step, stored: bytearray | memoryview, num_rows: int) -> float:
    """The largest magnitude of some rows. Raises CheckpointError for a value that cannot be quantized."""
    found, are_finite = magnitude_of(step, torch.frombuffer(stored, dtype=torch.uint8), num_rows)
    if not bool(are_finite):
        raise not_finite(step)
    return float(found)


def parts_of(
    step: Step, stored: Tensor, num_rows: int, amax: float = 0.0, *, is_first: bool = True
) -> tuple[list[Tensor], Tensor]:
    """What `convert_rows` gives, of bytes on any device and on that device: uint8[n] of each target; and bool[]:
    whether all values can be quantized. stored: uint8[num_bytes]."""
    layout, rows = step.layout, _read_rows(step, stored, num_rows)
    if step.permuted_head_dim:
        rows = _unpermute(rows, step.permuted_head_dim)
    if layout not in _QUANTIZERS and layout not in NEED_AMAX:
        kept = rows.to(getattr(torch, step.targets[0].dtype))
        return [_bytes(kept)], torch.ones((), dtype=torch.bool, device=stored.device)
    rows = rows.float()
    are_finite = torch.isfinite(rows).all()
    parts = _quantize_with(layout, rows, amax) if layout in NEED_AMAX else _QUANTIZERS[layout](rows)
    pieces = [_bytes(part) for part in parts.values()]
    if layout in NEED_AMAX and not is_first:
        pieces[-1] = pieces[-1][:0]
    return pieces, are_finite


def magnitude_of(step: Step, stored: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """What `largest` gives, as `parts_of` does: float32[], bool[]."""
    rows = _read_rows(step, stored, num_rows).float()
    found = rows.abs().amax() if rows.numel() else torch.zeros((), device=stored.device)
    return found, torch.isfinite(rows).all()


def not_finite(step: Step) -> CheckpointError:
    return fault(
        step.source.file.path,
        f"holds values that are not finite and cannot be quantized to {step.layout}; choose bf16 or f32",
        step.source.name,
    )


def convert_packed(step: Step, stored: Sequence[memoryview]) -> list[memoryview]:
    """The bytes of each target of a packed weight, of those of its sources."""
    return [_bytes(part).numpy().data.cast("B") for part in unpack(step, stored).values()]


def _quantize_with(layout: str, rows: Tensor, amax: float) -> dict[str, Tensor]:
    """The scale of the whole weight is the last part."""
    whole = torch.full((), amax, dtype=torch.float32, device=rows.device)
    if layout == fp8_per_tensor.LAYOUT:
        return fp8_per_tensor.quantize(rows, fp8_per_tensor.scale_for(whole).reshape(1))
    return nvfp4.quantize(rows, nvfp4.global_scale_for(whole))


def _read_rows(step: Step, stored: Tensor, num_rows: int) -> Tensor:
    """Stored bytes → [num_rows, cols] (a vector is one column); GGUF blocks become float32."""
    dtype = step.source.dtype
    if dtype.startswith("gguf."):
        return dequantize(dtype, {"weight": stored.view(num_rows, -1)})
    return stored.view(getattr(torch, dtype)).view(num_rows, -1)


def _unpermute(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads, [heads · head_dim, cols], from interleaved halves to one half after the other."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
