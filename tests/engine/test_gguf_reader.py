"""The GGUF header: as the library reads it, and every way in which it can be wrong."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from preload.engine.errors import CheckpointError
from preload.engine.loading.files import CheckpointFile
from preload.engine.loading.gguf_reader import read_header, read_metadata


def read(path: Path) -> Any:
    return read_header(CheckpointFile(str(path)))


def test_the_demo_model_reads_as_the_library_reads_it(demo_model: Path) -> None:
    header = read(demo_model)
    expected = gguf.GGUFReader(str(demo_model))
    assert len(header.tensors) == len(expected.tensors)
    by_name = {tensor.name: tensor for tensor in header.tensors}
    for tensor in expected.tensors:
        ours = by_name[tensor.name]
        assert ours.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        kind = tensor.tensor_type.name.lower()
        assert ours.dtype == {"f32": "float32"}.get(kind, f"gguf.{kind}")
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):
            value = header.metadata[key]
            assert (value if isinstance(value, int | float | str) else list(value)) == field.contents()


def test_every_value_type_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "größer ✓")
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_array("nested", [["a"], ["b", "c"]])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("h", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_metadata(str(path))
    assert metadata["u8"] == 200
    assert metadata["i8"] == -100
    assert metadata["u16"] == 60000
    assert metadata["i16"] == -30000
    assert metadata["u32"] == 4_000_000_000
    assert metadata["i32"] == -2_000_000_000
    assert metadata["u64"] == 1 << 63
    assert metadata["i64"] == -(1 << 62)
    assert metadata["f32"] == 0.5
    assert metadata["f64"] == 0.1
    assert metadata["yes"] is True
    assert metadata["text"] == "größer ✓"
    assert list(metadata["strings"]) == ["a", "", "ü"]
    assert metadata["ints"].to_list() == [1, -2, 3]
    assert metadata["floats"][1] == 0.25
    assert [list(item) for item in metadata["nested"]] == [["a"], ["b", "c"]]
    assert len(metadata["strings"]) == 3
    tensors = {tensor.name: tensor for tensor in read(path).tensors}
    assert tensors["t"].shape == (2, 3)
    assert tensors["h"].dtype == "float16"


F32, Q4_0 = 0, 2
ALIGN = "general.alignment"


def faults(build: Callable[..., bytes]) -> dict[str, tuple[bytes, str, str]]:
    """File content, tensor named, and what the message must say."""
    eight = ("s", (2,), F32, bytes(8), None)
    string = struct.pack("<Q", 1) + b"\xff"
    return {
        "magic": (b"GGML" + bytes(40), "", "starts with b'GGML'"),
        "version 1": (build([], version=1), "", "GGUF version 1"),
        "big endian": (build([], version=3 << 24), "", "big-endian"),
        "unsupported type": (build([("t", (256,), 10, bytes(84), None)]), "t", "has type 10 (Q2_K)"),
        "unknown type": (build([("t", (256,), 99, bytes(84), None)]), "t", "has type 99 (UNKNOWN)"),
        "partial block": (build([("t", (33,), Q4_0, bytes(36), None)]), "t", "not a multiple of Q4_0's block of 32"),
        "too many dimensions": (build([("t", (1,) * 5, F32, bytes(4), None)]), "t", "has 5 dimensions"),
        "tensor twice": (build([eight, eight]), "s", "is there twice"),
        "overlap": (build([eight, ("t", (2,), F32, bytes(8), 0)]), "t", "overlaps the one before it by 8"),
        "hole": (build([eight, ("t", (2,), F32, bytes(8), 64)]) + bytes(64), "t", "leaves a hole"),
        "unaligned": (build([eight, ("t", (2,), F32, bytes(8), 8)]), "t", "leaves a hole"),
        "past the end": (build([eight, ("t", (9,), F32, bytes(8), None)]), "t", "past the end of the file"),
        "trailing bytes": (build([eight]) + bytes(40), "", "has 40 trailing bytes"),
        "alignment": (build([eight], {ALIGN: (4, struct.pack("<I", 24))}), "", "impossible general.alignment 24"),
        "value type": (build([eight], {"k": (77, b"")}), "", "unknown value type 77 at key 'k'"),
        "text": (build([eight], {"k": (8, string)}), "", "not UTF-8"),
        "endless array": (build([eight], {"k": (9, struct.pack("<IQ", 5, 1 << 60))}), "", "header is longer than"),
        "endless string": (build([eight], {"k": (8, struct.pack("<Q", 1 << 60))}), "", "header is longer than"),
        "endless tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "", f"claims {1 << 60} tensors"),
        "endless keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 64) - 1), "", f"claims {(1 << 64) - 1} keys"),
        "more tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0), "", "header is longer than"),
        "endless text": (build([eight], {"k": (9, struct.pack("<IQQ", 8, 1, 1 << 63))}), "", "header is longer than"),
        "endless texts": (
            build([eight], {"k": (9, struct.pack("<IQQ", 8, 1 << 63, 1))}),
            "",
            "header is longer than",
        ),
        "endless arrays": (build([eight], {"k": (9, struct.pack("<IQ", 9, 1 << 63))}), "", "header is longer than"),
        "endless shape": (
            build([("t", (1 << 63, 0), F32, b"", None)]),
            "t",
            "impossible shape [0, 9223372036854775808]",
        ),
        "endless product": (build([("t", (1 << 40, 1 << 40), F32, b"", None)]), "t", "impossible shape"),
    }


FAULT_NAMES = [
    "magic", "version 1", "big endian", "unsupported type", "unknown type", "partial block", "too many dimensions",
    "tensor twice", "overlap", "hole", "unaligned", "past the end", "trailing bytes", "alignment", "value type",
    "text", "endless array", "endless string", "endless tensors", "endless keys", "more tensors", "endless text",
    "endless texts", "endless arrays", "endless shape", "endless product",
]  # fmt: skip


@pytest.mark.parametrize("name", FAULT_NAMES)
def test_a_faulty_header_is_refused_naming_file_and_tensor(
    name: str, tmp_path: Path, gguf_bytes: Callable[..., bytes]
) -> None:
    cases = faults(gguf_bytes)
    assert list(cases) == FAULT_NAMES
    content, tensor, message = cases[name]
    path = tmp_path / "weights.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message
    if tensor:
        assert repr(tensor) in caught.value.message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, gguf_bytes: Callable[..., bytes]) -> None:
    pairs = {"k": (9, struct.pack("<IQ", 8, 2) + (struct.pack("<Q", 1) + b"a") * 2)}
    whole = gguf_bytes([("s", (2,), F32, bytes(8), None), ("t", (2,), F32, bytes(8), None)], pairs)
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read(path)


def test_a_header_beyond_the_first_read_is_read_whole(tmp_path: Path, gguf_bytes: Callable[..., bytes]) -> None:
    text = "x" * (5 << 20)
    value = struct.pack("<Q", len(text)) + text.encode()
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf_bytes([("t", (2,), F32, bytes(8), None)], {"k": (8, value)}))
    assert read(path).metadata["k"] == text


def test_the_reader_needs_neither_torch_nor_numpy(demo_model: Path) -> None:
    code = (
        "import sys; from preload.engine.loading.gguf_reader import read_metadata\n"
        f"assert len(read_metadata({str(demo_model)!r})['tokenizer.ggml.tokens']) == 49152\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
