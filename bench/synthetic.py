"""Synthetic checkpoints: safetensors of any size and number of tensors, sparse on disk, with no model around them."""

from __future__ import annotations

import json
from pathlib import Path


def write_synthetic(path: Path, num_tensors: int, tensor_bytes: int) -> Path:
    """`num_tensors` uint8 tensors of `tensor_bytes` zeros each; load it with the model "raw"."""
    header = {
        f"tensor.{i:06}": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [i * tensor_bytes, (i + 1) * tensor_bytes],
        }
        for i in range(num_tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + num_tensors * tensor_bytes)
    return path
