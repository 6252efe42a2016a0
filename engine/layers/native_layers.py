"""All layers of a decoder as one native call: what `Ops.layers` gives where every operation of them is native.

Owns the structures of native/layers.h, made once; where each layer's cache lies is told at every call. Results
are the same bits as one operation after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.native.library import DecoderLayerStruct, NativeLibrary

from .ops import LayerCache, Rotation

if TYPE_CHECKING:
    from .native_ops import NativeAttention


class NativeLayers:
    """All layers of a decoder in one call. See native/layers.h."""

    def __init__(self, library: NativeLibrary, layers: Sequence[Sequence[Any]]) -> None:
        """layers: of each, its operations, all native, as `Layer.operations` orders them."""
        self._run, self._session = library.layers, library.session
        self._owned = layers  # the structures point into these
        self._attention: NativeAttention = layers[0][1]
        self._structs = (DecoderLayerStruct * len(layers))()
        for struct, (qkv, _, o, gated, down) in zip(self._structs, layers, strict=True):
            struct.qkv, struct.o, struct.gated, struct.down = qkv.part(), o.part(), gated.part(), down.part()

    def __call__(
        self, hidden: Tensor, rotation: Rotation, caches: Sequence[LayerCache], batch: AttentionBatch
    ) -> Tensor:
        for struct, (keys, values) in zip(self._structs, caches, strict=True):
            struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
        step = self._attention.step(rotation, caches[0], batch)
        hidden = hidden.contiguous()
        self._run(self._session, self._structs, len(self._structs), step, hidden.data_ptr())
        return hidden
