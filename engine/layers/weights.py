"""Weights by name: checks what a manifest offers against what a model needs, and hands it out.

Owns the bookkeeping of "every tensor is consumed, every need is met, every shape is right"; knows nothing of
what the weights are for. Invariant: after `finish()` no tensor of the manifest is unused. Nothing is copied:
what is handed out are views of the mapped segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from preload.engine.errors import ManifestError
from preload.engine.quantization.layouts import COMPANIONS, DENSE, LAYOUTS, companion_rows, dequantize_rows, num_cols


@dataclass(frozen=True)
class Weight:
    """A two-dimensional weight as it is resident: a layout tag and its parts, one row per output channel."""

    name: str
    layout: str
    parts: Mapping[str, Tensor]

    @cached_property
    def num_rows(self) -> int:
        return int(self.parts["weight"].shape[0])

    @cached_property
    def num_cols(self) -> int:
        return num_cols(self.layout, self.parts)

    def rows(self, index: slice | Tensor) -> Tensor:
        """Some rows as float32[n, num_cols]. index: a slice, or int64[n]."""
        return dequantize_rows(self.layout, self.parts, index)


class WeightTable:
    """The tensors of one shard by canonical name. Each `take_*` consumes; `finish` refuses leftovers."""

    def __init__(self, tensors: Mapping[str, Tensor], layouts: Mapping[str, str], compute_dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._layouts = layouts
        self._compute_dtype = compute_dtype
        self._unused = set(tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take_weight(self, name: str, num_rows: int, num_cols: int) -> Weight:
        """A two-dimensional weight in its layout. Raises ManifestError if it is missing or of another shape."""
        layout = self._layouts.get(name, DENSE)
        if layout not in LAYOUTS:
            raise ManifestError(f"{name}: unknown layout {layout!r}; this engine reads {', '.join(LAYOUTS)}")
        parts = {"weight": self._take(name)}
        for part in COMPANIONS.get(layout, ()):
            parts[part] = self._take(f"{name}_{part}")
        weight = Weight(name, layout, parts)
        dims = [tensor.dim() for tensor in parts.values()]
        found = (weight.num_rows, weight.num_cols) if dims[0] == 2 else tuple(parts["weight"].shape)
        if found != (num_rows, num_cols):
            raise ManifestError(f"{name} ({layout}) has shape {list(found)}; the model needs {[num_rows, num_cols]}")
        for part, tensor in parts.items():
            expected = num_rows if part == "weight" else companion_rows(layout, part, num_rows)
            if tensor.shape[0] != expected:
                raise ManifestError(f"{name}: its {part} has {tensor.shape[0]} rows instead of {expected}")
        return weight

    def take_vector(self, name: str, length: int, dtype: torch.dtype | None = None) -> Tensor:
        """A one-dimensional tensor: dtype[length], by default in the compute dtype."""
        tensor = self._take(name)
        if tuple(tensor.shape) != (length,):
            raise ManifestError(f"{name} has shape {list(tensor.shape)}; the model needs {[length]}")
        dtype = dtype or self._compute_dtype
        if tensor.dtype != dtype:
            raise ManifestError(f"{name} is {tensor.dtype}; the recipe's compute dtype needs {dtype}")
        return tensor

    def finish(self) -> None:
        """Raises ManifestError if a tensor was not consumed."""
        if self._unused:
            names = sorted(self._unused)
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ManifestError(f"the model has no use for these tensors: {shown}", {"tensor": names[0]})

    def _take(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ManifestError(f"tensor {name} is missing; the model needs it", {"tensor": name})
        self._unused.discard(name)
        return tensor
