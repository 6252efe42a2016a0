"""The largest of each row, for rows as wide as a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax_rows(x: Tensor) -> Tensor:
    """The first largest of each row, a NaN counting as the largest: int64[num_rows]. x: float32[num_rows, num_cols].

    By numpy on CPUs, which compares whole vectors: torch's own takes ten to twenty times as long there."""
    if x.device.type != "cpu":
        return x.argmax(dim=-1)
    return torch.from_numpy(x.numpy().argmax(axis=-1))
