"""The safetensors header: as the library reads it, and every way in which it can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from preload.engine.errors import CheckpointError
from preload.engine.loading.files import MAX_HEADER_BYTES, CheckpointFile
from preload.engine.loading.safetensors_reader import read_header


def write(path: Path, header: object, data: bytes, claimed: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if claimed is None else claimed).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def test_the_header_says_what_the_library_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.normal(size=(3, 5)).astype(np.float32),
        "half": rng.normal(size=(7,)).astype(np.float16),
        "ids": rng.integers(0, 9, (2, 2, 2)),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), np.float32),
        "flag": np.array([True, False]),
        "byte": np.arange(5, dtype=np.uint8),
    }
    path = tmp_path / "a.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    file = CheckpointFile(str(path))
    tensors, _ = read_header(file)
    expected = load_file(path)
    assert {tensor.name for tensor in tensors} == set(expected)
    for tensor in tensors:
        array = expected[tensor.name]
        assert tensor.shape == array.shape
        assert tensor.dtype == array.dtype.name
        assert file.read(tensor.offset, tensor.num_bytes) == array.tobytes()
    assert [tensor.offset for tensor in tensors] == sorted(tensor.offset for tensor in tensors)


FAULTS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "no header": (lambda p: (p.write_bytes(b"abc"), p)[1], "", "is truncated: it has 3 bytes"),
    "longer than the file": (lambda p: write(p, {}, b"", claimed=500), "", "header of 500 bytes is longer than"),
    "over the limit": (lambda p: write(p, {}, b"", claimed=MAX_HEADER_BYTES + 1), "", "over the limit of 100000000"),
    "not JSON": (lambda p: write(p, b"{nope", b""), "", "no valid JSON in its header"),
    "not UTF-8": (lambda p: write(p, b'{"\xff": 1}', b""), "", "no valid JSON in its header"),
    "nested endlessly": (lambda p: write(p, b'{"a":' + b"[" * 200_000, b""), "", "no valid JSON in its header"),
    "not an object": (lambda p: write(p, [], b""), "", "must hold a JSON object"),
    "duplicate key": (
        lambda p: write(p, b'{"t": %s, "t": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "t",
        "key 't' twice",
    ),
    "entry is no object": (lambda p: write(p, {"t": 3}, b""), "t", "described by int"),
    "unknown dtype": (lambda p: write(p, {"t": entry("F4")}, bytes(8)), "t", "unknown dtype 'F4'"),
    "dtype is no string": (lambda p: write(p, {"t": entry(7)}, bytes(8)), "t", "unknown dtype 7"),
    "shape is no list": (lambda p: write(p, {"t": entry(shape=2)}, bytes(8)), "t", "as its shape"),
    "negative shape": (lambda p: write(p, {"t": entry(shape=(-2,))}, bytes(8)), "t", "as its shape"),
    "shape of booleans": (lambda p: write(p, {"t": entry(shape=(True,))}, bytes(8)), "t", "as its shape"),
    "endless shape": (lambda p: write(p, {"t": entry(shape=(0, 1 << 63))}, b""), "t", "impossible shape"),
    "too many dimensions": (lambda p: write(p, {"t": entry(shape=(1,) * 17)}, bytes(8)), "t", "has 17 dimensions"),
    "half a character": (lambda p: write(p, {"\ud800": entry()}, bytes(8)), "", "surrogates not allowed"),
    "half a character within": (
        lambda p: write(p, {"__metadata__": {"a": "\udfff"}, "t": entry()}, bytes(8)),
        "",
        "surrogates not allowed",
    ),
    "nested deeply": (lambda p: write(p, b'{"a":%s}' % (b"[" * 500 + b"]" * 500), b""), "", "deeper than 64 levels"),
    "a number that is none": (lambda p: write(p, b'{"t":{"shape":[NaN]}}', b""), "", "NaN is not JSON"),
    "a number without end": (lambda p: write(p, b'{"t":{"shape":[1e999]}}', b""), "", "too large"),
    "offsets reversed": (lambda p: write(p, {"t": entry(begin=8, end=0)}, bytes(8)), "t", "impossible data_offsets"),
    "size is not shape times dtype": (
        lambda p: write(p, {"t": entry(shape=(3,))}, bytes(8)),
        "t",
        "has 8 bytes, but F32 [3] needs 12",
    ),
    "overlap": (
        lambda p: write(p, {"s": entry(), "t": entry(begin=4, end=12)}, bytes(12)),
        "t",
        "overlaps the one before it by 4 bytes",
    ),
    "same place": (lambda p: write(p, {"s": entry(), "t": entry()}, bytes(8)), "t", "overlaps"),
    "hole": (
        lambda p: write(p, {"s": entry(), "t": entry(begin=16, end=24)}, bytes(24)),
        "t",
        "leaves a hole of 8 bytes",
    ),
    "hole at the start": (lambda p: write(p, {"t": entry(begin=8, end=16)}, bytes(16)), "t", "leaves a hole"),
    "past the end": (
        lambda p: write(p, {"s": entry(), "t": entry(begin=8, end=16)}, bytes(12)),
        "t",
        "past the end of the file",
    ),
    "trailing bytes": (lambda p: write(p, {"t": entry()}, bytes(11)), "", "has 3 trailing bytes"),
    "metadata is no object": (lambda p: write(p, {"__metadata__": 1}, b""), "", "__metadata__"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_header_is_refused_naming_file_and_tensor(name: str, tmp_path: Path) -> None:
    build, tensor, message = FAULTS[name]
    path = build(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_header(CheckpointFile(str(path)))
    assert str(path) in caught.value.message
    assert message in caught.value.message
    if tensor:
        assert repr(tensor) in caught.value.message
    assert caught.value.fields["file"] == str(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.safetensors", {"s": entry(), "t": entry(begin=8, end=16)}, bytes(16)).read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            read_header(CheckpointFile(str(path)))
