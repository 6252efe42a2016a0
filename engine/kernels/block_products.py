"""Products with quantized weights on CPUs, in plain torch: the same results as dequantizing first, sooner.

The specification of each is `functional.linear(x.float(), dequantize(layout, parts))`, to rounding. What makes
the difference: nibbles are taken apart eight at a time as 32-bit words, all low ones of a row before all high
ones, and x's columns are put in that order instead of the weight's; all work of a piece of rows happens in scratch
that fits a core's cache; and a minimum is never added to the weights, because

    Σ_j (d·q_j + m)·x_j  =  d·Σ_j q_j·x_j + m·Σ_j x_j        over each block of 32 columns,

which leaves one small product with the blocks' sums of x. Formats: engine/quantization. Scratch is bounded by
PIECE_ELEMENTS whatever the size of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

PIECE_ELEMENTS = 1 << 18
"""Weights unpacked at once: 1 MiB of float32."""

_LOW_NIBBLES = 0x0F0F0F0F

Unpack = Callable[[slice, Tensor], tuple[Tensor, Tensor | None]]
"""(rows, quants to fill: uint8[n, 2, num_blocks, 16] of nibbles, or int8[n, 1, num_blocks, 32]) → scale and
minimum: float32[n, num_blocks] each; the minimum may be none."""

Parts = Mapping[str, Tensor]


def product_q4_0(x: Tensor, parts: Parts) -> Tensor:
    """x: dtype[num_tokens, num_cols]; weight: uint8[num_rows, num_blocks · 18] → dtype[num_tokens, num_rows]."""
    words = _blocks(parts["weight"], torch.int16, 9)

    def unpack(rows: slice, quants: Tensor) -> tuple[Tensor, Tensor | None]:
        scale = _halves(words[rows, :, :1])[..., 0]
        _split_nibbles(_copy(words[rows, :, 1:]).view(torch.int32), quants)
        return scale, scale * -8

    return _product(x, _low_half_first(x), words.shape[:2], unpack)


def product_q4_1(x: Tensor, parts: Parts) -> Tensor:
    """x: dtype[num_tokens, num_cols]; weight: uint8[num_rows, num_blocks · 20] → dtype[num_tokens, num_rows]."""
    words = _blocks(parts["weight"], torch.int32, 5)

    def unpack(rows: slice, quants: Tensor) -> tuple[Tensor, Tensor | None]:
        halves = _halves(words[rows, :, :1])
        _split_nibbles(_copy(words[rows, :, 1:]), quants)
        return halves[..., 0], halves[..., 1]

    return _product(x, _low_half_first(x), words.shape[:2], unpack)


def product_q8_0(x: Tensor, parts: Parts) -> Tensor:
    """x: dtype[num_tokens, num_cols]; weight: uint8[num_rows, num_blocks · 34] → dtype[num_tokens, num_rows]."""
    words = _blocks(parts["weight"], torch.int16, 17)

    def unpack(rows: slice, quants: Tensor) -> tuple[Tensor, Tensor | None]:
        quants.view(torch.int16)[:, 0].copy_(words[rows, :, 1:])
        return _halves(words[rows, :, :1])[..., 0], None

    return _product(x, x, words.shape[:2], unpack, nibbles=False)


def product_int4_group32(x: Tensor, parts: Parts) -> Tensor:
    """x: dtype[num_tokens, num_cols]; parts: weight uint8[num_rows, num_cols/2], scale and min
    float32[num_rows, num_cols/group], the group a multiple of 32 → dtype[num_tokens, num_rows]."""
    words = _blocks(parts["weight"], torch.int32, 4)
    repeats = words.shape[1] // max(1, parts["scale"].shape[1])

    def unpack(rows: slice, quants: Tensor) -> tuple[Tensor, Tensor | None]:
        _split_nibbles(_copy(words[rows]), quants)
        scale, minimum = parts["scale"][rows], parts["min"][rows]
        if repeats > 1:
            return scale.repeat_interleave(repeats, dim=1), minimum.repeat_interleave(repeats, dim=1)
        return scale, minimum

    even_first = x.view(x.shape[0], x.shape[1] // 2, 2).transpose(1, 2).reshape(x.shape)
    return _product(x, even_first, words.shape[:2], unpack)


def product_int8_per_channel(x: Tensor, parts: Parts) -> Tensor:
    """x: dtype[num_tokens, num_cols]; parts: weight int8[num_rows, num_cols], scale float32[num_rows]
    → dtype[num_tokens, num_rows]."""
    weight, wide = parts["weight"], x.float()
    out = torch.empty(x.shape[0], weight.shape[0])
    step = max(1, PIECE_ELEMENTS // weight.shape[1])
    scratch = torch.empty(min(step, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], step):
        piece = weight[start : start + step]
        out[:, start : start + step] = functional.linear(wide, scratch[: len(piece)].copy_(piece))
    return out.mul_(parts["scale"]).to(x.dtype)


def _product(x: Tensor, ordered: Tensor, shape: torch.Size, unpack: Unpack, *, nibbles: bool = True) -> Tensor:
    """ordered: x with its columns in the order of the quants; shape: (num_rows, num_blocks)."""
    num_rows, num_blocks = shape
    sums = x.float().view(x.shape[0], num_blocks, 32).sum(dim=-1)
    ordered = ordered.float()
    out = torch.empty(x.shape[0], num_rows)
    step = min(num_rows, max(1, PIECE_ELEMENTS // (num_blocks * 32)))
    if nibbles:
        quants = torch.empty(step, 2, num_blocks, 16, dtype=torch.uint8)
    else:
        quants = torch.empty(step, 1, num_blocks, 32, dtype=torch.int8)
    values = torch.empty(quants.shape)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        count = rows.stop - start
        scale, minimum = unpack(rows, quants[:count])
        piece = values[:count].copy_(quants[:count])
        torch.mul(scale[:, None, :, None], piece, out=piece)  # several times faster than with piece first
        result = functional.linear(ordered, piece.view(count, -1))
        out[:, rows] = result if minimum is None else result.addmm_(sums, minimum.T)
    return out.to(x.dtype)


def _low_half_first(x: Tensor) -> Tensor:
    """Columns 0 … 15 of every block of 32, then columns 16 … 31 of every block: dtype[num_tokens, num_cols]."""
    return x.view(x.shape[0], x.shape[1] // 32, 2, 16).transpose(1, 2).reshape(x.shape)


def _blocks(weight: Tensor, word: torch.dtype, num_words: int) -> Tensor:
    """uint8[num_rows, num_blocks · bytes] → word[num_rows, num_blocks, num_words], a view."""
    return weight.view(word).view(weight.shape[0], -1, num_words)


def _copy(words: Tensor) -> Tensor:
    """A copy in any case: `contiguous` would hand out the read-only weight itself where it is contiguous."""
    return words.clone(memory_format=torch.contiguous_format)


def _halves(words: Tensor) -> Tensor:
    """The float16 numbers in integer words, as float32[n, num_blocks, numbers]."""
    return words.contiguous().view(torch.float16).float()


def _split_nibbles(words: Tensor, quants: Tensor) -> None:
    """words: int32[n, num_blocks, 4], which is spoiled → quants: uint8[n, 2, num_blocks, 16], low ones first."""
    out = quants.view(torch.int32)
    torch.bitwise_and(words, _LOW_NIBBLES, out=out[:, 0])
    torch.bitwise_and(words.bitwise_right_shift_(4), _LOW_NIBBLES, out=out[:, 1])


PRODUCTS: dict[str, Callable[[Tensor, Parts], Tensor]] = {
    "gguf.q4_0": product_q4_0,
    "gguf.q4_1": product_q4_1,
    "gguf.q8_0": product_q8_0,
    "int4_group32": product_int4_group32,
    "int4_group64": product_int4_group32,
    "int4_group128": product_int4_group32,
    "int8_per_channel": product_int8_per_channel,
}
"""By layout. Layouts that are not here are computed by rows, see engine/layers/linear.py."""
