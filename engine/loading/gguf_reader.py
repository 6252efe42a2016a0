"""The header of a GGUF file, versions 2 and 3, little endian.

    "GGUF", version:u32, num_tensors:u64, num_pairs:u64
    num_pairs × { key:string, type:u32, value }          string = length:u64 + UTF-8 bytes
                                                         array  = item type:u32, count:u64, items
    num_tensors × { name:string, num_dims:u32, dims:u64 × num_dims, type:u32, offset:u64 }
    padding to `general.alignment` (32 if it is not given); offsets count from here

Dimensions are stored fastest first: a weight of [rows, cols] is stored as (cols, rows). Tensors follow each
other in the order of their offsets, each start aligned.

Own reader because the library decodes every string of the vocabulary through numpy, which takes most of a
second. Here arrays are only measured while reading, and decoded when somebody looks. No torch, no numpy: the frontend
reads its tokenizer through this module. Every fault is a CheckpointError naming file, key or tensor.
Source: the GGUF specification in the ggml repository.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from .files import MAX_HEADER_BYTES, REPLACE, CheckpointFile, TensorInfo, fault, require_plausible
from .gguf_types import GGUF_TYPES, UNSUPPORTED_NAMES

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 20
_FIRST_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (arrays as GgufArray), tensors in file order, and the byte at which the data starts."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_start: int


class GgufArray(Sequence[Any]):
    """An array of the metadata, decoded at the first look and then kept."""

    def __init__(self, header: _Cursor, key: str, item_type: int, count: int, start: int) -> None:
        self._header = header
        self._key = key
        self._item_type = item_type
        self._count = count
        self._start = start
        self._items: list[Any] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.to_list()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_list())

    def to_list(self) -> list[Any]:
        """All items; the same list at every call. Raises CheckpointError for bytes that are not UTF-8."""
        if self._items is None:
            self._items = self._header.decode_array(self._key, self._item_type, self._count, self._start)
        return self._items


class _NeedMoreError(Exception):
    """The header goes on after what has been read."""


class _Cursor:
    """Walks over the bytes of a header."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def scalar(self, code: str) -> Any:
        start = self.position
        self.skip(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def skip(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self.position > len(self.data):
            raise _NeedMoreError

    def string(self, what: str) -> str:
        num_bytes = self.scalar("Q")
        start = self.position
        self.skip(num_bytes)
        return self._decode(start, self.position, what)

    def value(self, key: str, type_id: int, depth: int = 0) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string(f"value of {key!r}")
        if type_id != _ARRAY:
            raise fault(self.path, f"has the unknown value type {type_id} at key {key!r}; {REPLACE}")
        if depth >= _MAX_NESTING:
            raise fault(self.path, f"nests arrays too deeply at key {key!r}; {REPLACE}")
        item_type, count = self.scalar("I"), self.scalar("Q")
        start = self.position
        self._skip_items(key, item_type, count, depth)
        return GgufArray(self, key, item_type, count, start)

    def _skip_items(self, key: str, item_type: int, count: int, depth: int) -> None:
        if item_type in _SCALARS:
            self.skip(struct.calcsize("<" + _SCALARS[item_type]) * count)
        elif item_type == _STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self.value(key, item_type, depth + 1)

    def _skip_strings(self, count: int) -> None:
        """A vocabulary has hundreds of thousands of strings: only their lengths are read."""
        position, unpack, data = self.position, struct.Struct("<Q").unpack_from, self.data
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError) as error:  # a length may lead beyond what an offset can be
            raise _NeedMoreError from error
        self.position = position
        self.skip(0)

    def decode_array(self, key: str, item_type: int, count: int, start: int) -> list[Any]:
        if item_type in _SCALARS:
            return list(struct.unpack_from(f"<{count}{_SCALARS[item_type]}", self.data, start))
        if item_type == _STRING:
            return self._decode_strings(key, count, start)
        cursor = _Cursor(self.data, self.path)
        cursor.position = start
        return [cursor.value(key, item_type, 1) for _ in range(count)]

    def _decode_strings(self, key: str, count: int, start: int) -> list[Any]:
        position, unpack, data = start, struct.Struct("<Q").unpack_from, self.data
        items = []
        try:
            for _ in range(count):
                end = position + 8 + unpack(data, position)[0]
                items.append(data[position + 8 : end].decode("utf-8"))
                position = end
        except UnicodeDecodeError as error:
            raise fault(self.path, f"has a string in {key!r} that is not UTF-8: {error}; {REPLACE}") from error
        return items

    def _decode(self, start: int, end: int, what: str) -> str:
        try:
            return self.data[start:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise fault(self.path, f"has a {what} that is not UTF-8: {error}; {REPLACE}") from error


def read_header(file: CheckpointFile) -> GgufHeader:
    """Metadata and tensors of the file. Raises CheckpointError."""
    num_bytes = _FIRST_READ_BYTES
    while True:
        data = file.read(0, min(num_bytes, file.size_bytes))
        try:
            return _parse(file, _Cursor(data, file.path))
        except _NeedMoreError:
            if len(data) == file.size_bytes:
                raise fault(
                    file.path,
                    f"is truncated: its header is longer than the file of {len(data)} bytes; {REPLACE}",
                ) from None
        if num_bytes >= MAX_HEADER_BYTES:
            raise fault(file.path, f"has a header over the limit of {MAX_HEADER_BYTES} bytes; {REPLACE}")
        num_bytes = min(num_bytes * 4, MAX_HEADER_BYTES)


def read_metadata(path: str) -> dict[str, Any]:
    """Only the metadata, for one who needs no weights. Raises CheckpointError."""
    file = CheckpointFile(path)
    try:
        return read_header(file).metadata
    finally:
        file.close()


def _parse(file: CheckpointFile, cursor: _Cursor) -> GgufHeader:
    num_tensors, num_pairs = _preamble(file, cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string("key")
        if key in metadata:
            raise fault(file.path, f"has the key {key!r} twice in its header; {REPLACE}")
        metadata[key] = cursor.value(key, cursor.scalar("I"))
    entries = [_entry(file, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise fault(file.path, f"has the impossible general.alignment {alignment!r}; {REPLACE}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = [
        TensorInfo(name, dtype, shape, file, data_start + offset, num_bytes)
        for name, dtype, shape, offset, num_bytes in entries
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.offset + tensor.num_bytes))
    _check_names(file, tensors)
    _check_offsets(file, tensors, data_start, alignment)
    return GgufHeader(metadata, tensors, data_start)


def _preamble(file: CheckpointFile, cursor: _Cursor) -> tuple[int, int]:
    """Magic and version; returns the numbers of tensors and of metadata pairs."""
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise fault(file.path, f"is not a GGUF file: it starts with {magic!r}; check the path")
    cursor.skip(4)
    version = cursor.scalar("I")
    if version in (2 << 24, 3 << 24):
        raise fault(file.path, "is a big-endian GGUF file, which is not supported; convert it to little endian")
    if version not in (2, 3):
        raise fault(file.path, f"has GGUF version {version}; versions 2 and 3 are supported; convert it anew")
    num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
    for what, count, limit in (("tensors", num_tensors, _MAX_TENSORS), ("keys", num_pairs, _MAX_PAIRS)):
        if count > limit:
            raise fault(file.path, f"claims {count} {what}, over the limit of {limit}; {REPLACE}")
    return num_tensors, num_pairs


def _entry(file: CheckpointFile, cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, dtype, row-major shape, offset and size of one tensor."""
    name = cursor.string("tensor name")
    num_dims = cursor.scalar("I")
    if num_dims > _MAX_DIMS:
        raise fault(file.path, f"has {num_dims} dimensions, more than {_MAX_DIMS}; {REPLACE}", name)
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    require_plausible(file.path, name, shape)
    type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
    kind = GGUF_TYPES.get(type_id)
    if kind is None:
        label = UNSUPPORTED_NAMES.get(type_id, "unknown").upper()
        known = ", ".join(t.name.upper() for t in GGUF_TYPES.values())
        raise fault(file.path, f"has type {type_id} ({label}); supported are {known}; requantize it", name)
    cols = shape[-1] if shape else 1
    if cols % kind.block_size:
        raise fault(
            file.path,
            f"has rows of {cols} values, not a multiple of {kind.name.upper()}'s block of "
            f"{kind.block_size}; {REPLACE}",
            name,
        )
    dtype = f"gguf.{kind.name}" if kind.is_quantized else _FLOATS[kind.name]
    return name, dtype, shape, offset, math.prod(shape) // kind.block_size * kind.block_bytes


_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def _check_names(file: CheckpointFile, tensors: list[TensorInfo]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise fault(file.path, f"is there twice; {REPLACE}", tensor.name)
        seen.add(tensor.name)


def _check_offsets(file: CheckpointFile, tensors: list[TensorInfo], data_start: int, alignment: int) -> None:
    """The tensors, sorted by offset, must follow each other with nothing but padding between them."""
    position = data_start
    for tensor in tensors:
        expected = data_start + -(-(position - data_start) // alignment) * alignment
        if tensor.offset < position:
            raise fault(file.path, f"overlaps the one before it by {position - tensor.offset} bytes; {REPLACE}",
                        tensor.name)  # fmt: skip
        if tensor.offset != expected:
            raise fault(
                file.path,
                f"starts at byte {tensor.offset} and leaves a hole: it should start at {expected}; {REPLACE}",
                tensor.name,
            )
        position = tensor.offset + tensor.num_bytes
        if position > file.size_bytes:
            raise fault(
                file.path,
                f"ends at byte {position}, past the end of the file at {file.size_bytes}: "
                f"the file is truncated; {REPLACE}",
                tensor.name,
            )
    num_trailing = file.size_bytes - position
    if num_trailing >= alignment:
        raise fault(file.path, f"has {num_trailing} trailing bytes after its last tensor; {REPLACE}")
