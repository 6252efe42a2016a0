"""Packed weights of GPTQ and AWQ, as their stored tensors → the parts of int4_group32, 64 or 128. Formats: packed.py.

Whole tensors at a time, since words run down columns that are to lie along rows. With float16 scales the result means
the very numbers that are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .files import fault
from .steps import Step

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight numbers is in nibble i."""


def unpack(step: Step, stored: Sequence[memoryview]) -> dict[str, Tensor]:
    """ "weight", "scale" and "min" of the step's targets. `stored`: the bytes of `step.sources`.

    Raises CheckpointError if columns are not in the order of their groups, as act-order leaves them."""
    assert step.packing is not None
    tensors = {
        source.name.rpartition(".")[2]: torch.frombuffer(data, dtype=getattr(torch, source.dtype)).view(source.shape)
        for source, data in zip(step.sources, stored, strict=True)
    }
    cols, num_groups = 2 * step.targets[0].shape[1], step.targets[1].shape[1]
    scales = tensors["scales"].float()
    _check_order(step, tensors.get("g_idx"), cols // scales.shape[0])
    is_awq = step.packing.method == "awq"
    zeros = _nibbles_across(tensors["qzeros"], _AWQ_ORDER if is_awq else range(8))
    if step.packing.method == "gptq":
        zeros = zeros + 1
    if is_awq:
        codes = _nibbles_across(tensors["qweight"], _AWQ_ORDER).T
    else:
        codes = _nibbles_across(tensors["qweight"].T.contiguous(), range(8))
    codes = codes.to(torch.uint8)
    repeats = num_groups // scales.shape[0]
    scale, minimum = (t.T.repeat_interleave(repeats, dim=1) for t in (scales, -(zeros * scales)))
    return {"weight": codes[:, 0::2] | (codes[:, 1::2] << 4), "scale": scale, "min": minimum}


def _nibbles_across(words: Tensor, order: Sequence[int]) -> Tensor:
    """int32[n, m] → int32[n, 8·m]: nibble i of a word is number order[i] of its eight."""
    shifts = torch.empty(8, dtype=torch.int32)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & 0xF).flatten(1)


def _check_order(step: Step, groups: Tensor | None, group_size: int) -> None:
    if groups is None or torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // group_size):
        return
    source = step.sources[-1]
    raise fault(
        source.file.path,
        "puts columns into groups out of their order (act-order, desc_act=true), which this engine does not compute; "
        "quantize with desc_act=false",
        source.name,
    )
