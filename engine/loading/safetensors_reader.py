"""The header of a safetensors file.

    8 bytes    N, little-endian uint64
    N bytes    JSON object: {"<name>": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …,
               "__metadata__": {"<key>": "<string>"}}; may end in spaces
    the rest   the tensors' bytes, row major; offsets count from here and cover it without overlap or hole

Own reader because the library gives neither offsets in the file nor errors that name the tensor. Every fault
is a CheckpointError that names the file, the tensor if there is one, and what is wrong.
Source: the format section of the safetensors repository's README.
"""

from __future__ import annotations

import math
from typing import Any

from .dtypes import ITEM_BYTES, SAFETENSORS_DTYPES
from .files import MAX_HEADER_BYTES, REPLACE, CheckpointFile, TensorInfo, fault, require_plausible
from .strict_json import parse_object


def read_header(file: CheckpointFile) -> tuple[list[TensorInfo], int]:
    """The tensors in file order, and the byte at which the data starts. Raises CheckpointError."""
    if file.size_bytes < 8:
        raise fault(file.path, f"is truncated: it has {file.size_bytes} bytes and no header; {REPLACE}")
    num_header_bytes = int.from_bytes(file.read(0, 8), "little")
    if num_header_bytes > MAX_HEADER_BYTES:
        raise fault(
            file.path,
            f"claims a header of {num_header_bytes} bytes, over the limit of {MAX_HEADER_BYTES}; {REPLACE}",
        )
    data_start = 8 + num_header_bytes
    if data_start > file.size_bytes:
        raise fault(
            file.path,
            f"is truncated: its header of {num_header_bytes} bytes is longer than the file of "
            f"{file.size_bytes} bytes; {REPLACE}",
        )
    entries = parse_object(file.read(8, num_header_bytes), file.path, "header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise fault(file.path, f"has a __metadata__ that is not a JSON object; {REPLACE}")
    tensors = [_tensor(file, name, entry, data_start) for name, entry in entries.items()]
    # An empty tensor begins where its successor does, so the end decides between them.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.offset + tensor.num_bytes))
    _check_offsets(file, tensors, data_start)
    return tensors, data_start


def _tensor(file: CheckpointFile, name: str, entry: Any, data_start: int) -> TensorInfo:
    """One entry of the header, its size checked against dtype and shape."""
    if not isinstance(entry, dict):
        raise fault(file.path, f"is described by {type(entry).__name__}, not by an object; {REPLACE}", name)
    code = entry.get("dtype")
    dtype = SAFETENSORS_DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        known = ", ".join(SAFETENSORS_DTYPES)
        raise fault(file.path, f"has the unknown dtype {code!r}; known are {known}; convert the checkpoint", name)
    shape = _sizes(file, name, "shape", entry.get("shape"))
    require_plausible(file.path, name, shape)
    offsets = _sizes(file, name, "data_offsets", entry.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(file.path, f"has the impossible data_offsets {list(offsets)}; {REPLACE}", name)
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if num_bytes != offsets[1] - offsets[0]:
        raise fault(
            file.path,
            f"has {offsets[1] - offsets[0]} bytes, but {code} {list(shape)} needs {num_bytes}; {REPLACE}",
            name,
        )
    return TensorInfo(name, dtype, shape, file, data_start + offsets[0], num_bytes)


def _sizes(file: CheckpointFile, name: str, key: str, value: Any) -> tuple[int, ...]:
    """A list of non-negative integers (JSON's true is none of them)."""
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise fault(file.path, f"has {value!r} as its {key}, not a list of sizes; {REPLACE}", name)
    return tuple(value)


def _check_offsets(file: CheckpointFile, tensors: list[TensorInfo], data_start: int) -> None:
    """The tensors, sorted by offset, must cover the data exactly."""
    position = data_start
    for tensor in tensors:
        if tensor.offset < position:
            raise fault(file.path, f"overlaps the one before it by {position - tensor.offset} bytes; {REPLACE}",
                        tensor.name)  # fmt: skip
        if tensor.offset > position:
            raise fault(file.path, f"leaves a hole of {tensor.offset - position} bytes before it; {REPLACE}",
                        tensor.name)  # fmt: skip
        position += tensor.num_bytes
        if position > file.size_bytes:
            raise fault(
                file.path,
                f"ends at byte {position}, past the end of the file at {file.size_bytes}: "
                f"the file is truncated; {REPLACE}",
                tensor.name,
            )
    if position < file.size_bytes:
        raise fault(file.path, f"has {file.size_bytes - position} trailing bytes after its last tensor; {REPLACE}")
