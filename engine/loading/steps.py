"""What a load does, tensor by tensor: a `Step` per stored tensor, a `Target` per resident one.

Plain data, shared by resolving (which makes steps), planning (which gives targets a place) and filling.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace

from preload.engine.models.spec import ModelSpec
from preload.engine.recipe import LAYOUT_VERSION, Recipe, canonical_json

from .dtypes import ITEM_BYTES
from .files import TensorInfo


@dataclass(frozen=True)
class Target:
    """One resident tensor. `dtype` is torch's name, `layout` the tag that the engine reads it by."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = "dense"
    is_buffer: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Packing:
    """How a checkpoint that was quantized elsewhere stores its 4-bit weights. `method`: "gptq", "gptq_v2" (whose zero
    points are stored as they are, not less one), or "awq". `group_size`: columns of one scale; −1: all of them."""

    method: str
    group_size: int


@dataclass(frozen=True)
class Step:
    """What becomes of one stored tensor.

    No target: its bytes only count for the digest. One target and not `converts`: it stays as it is, but for its
    rows if `permuted_head_dim` is set. Else the first target is the weight, the others its companions. With a
    `packing`, the weight is stored as several tensors, which are read whole and converted together; without one,
    `others` are further rows of the same weight.
    """

    source: TensorInfo
    targets: tuple[Target, ...] = ()
    converts: bool = False
    permuted_head_dim: int = 0  # 0: rows stay where they are
    packing: Packing | None = None
    others: tuple[TensorInfo, ...] = ()

    @property
    def parts(self) -> list[Step]:
        """One after the other, what becomes of each stored tensor; of a packed weight there are none."""
        return [replace(self, source=source, others=()) for source in self.sources]

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """Every stored tensor of it."""
        return (self.source, *self.others)

    @property
    def layout(self) -> str:
        """Of what it becomes; empty if nothing is kept."""
        return self.targets[0].layout if self.targets else ""

    @property
    def num_rows(self) -> int:
        """Rows by which the tensor may be cut into pieces; a vector is a column."""
        shape = self.source.shape
        return shape[0] if shape else 1


@dataclass(frozen=True)
class Resolved:
    """A checkpoint and a recipe, understood. `equal_sources` names two stored tensors whose bytes must agree."""

    model: str
    recipe: Recipe
    spec: ModelSpec | None
    steps: list[Step]
    aliases: list[tuple[Target, str]] = field(default_factory=list)  # a target without memory, and whose it shares
    equal_sources: tuple[TensorInfo, TensorInfo] | None = None
    packing: Packing | None = None

    @property
    def num_source_bytes(self) -> int:
        return sum(source.num_bytes for step in self.steps for source in step.sources)

    def to_json(self) -> str:
        """The recipe as resolved: with the checkpoint digest, the generation's identity."""
        return canonical_json(
            {
                "model": self.model,
                "spec": self.spec.to_dict() if self.spec else None,
                "quantization": self.recipe.quantization,
                "compute_dtype": self.recipe.compute_dtype,
                "layout_version": LAYOUT_VERSION,
                **({"packing": asdict(self.packing)} if self.packing else {}),
            }
        )
