"""Tensor types of GGUF files: numbers in the file, names, and the size of their blocks.

Owns the one table of block geometry; the block formats' bytes are explained in `engine/quantization`. Imports
nothing heavy: the reader and the frontend use it without torch and numpy.
Source: the GGUF specification and ggml's `ggml_type` numbering.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """One tensor type: `block_bytes` bytes hold `block_size` consecutive weights of a row."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


GGUF_TYPES: dict[int, GgufType] = {
    0: GgufType("f32", 1, 4),
    1: GgufType("f16", 1, 2),
    2: GgufType("q4_0", 32, 18),
    3: GgufType("q4_1", 32, 20),
    6: GgufType("q5_0", 32, 22),
    7: GgufType("q5_1", 32, 24),
    8: GgufType("q8_0", 32, 34),
    12: GgufType("q4_k", 256, 144),
    13: GgufType("q5_k", 256, 176),
    14: GgufType("q6_k", 256, 210),
    30: GgufType("bf16", 1, 2),
}
"""Every type that can be loaded, by its number in the file."""

BLOCK_TYPES: dict[str, GgufType] = {t.name: t for t in GGUF_TYPES.values() if t.is_quantized}
"""The block-quantized types by name."""

UNSUPPORTED_NAMES: dict[int, str] = {
    9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64",
    28: "f64", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip
"""Names of types that exist but are not loaded, so that a refusal can say which one it met."""
