"""Names and sizes of element types, without importing torch.

A dtype is named as torch names it ("float32", "bfloat16", …). GGUF's block-quantized types are named
"gguf.<type>" where a tensor of a checkpoint is described; they have no size per element.
"""

from __future__ import annotations

SAFETENSORS_DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""Dtype codes of a safetensors header and our names for them."""

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}
"""Bytes of one element."""

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes that a model's weights may be stored in, beside GGUF's blocks."""
