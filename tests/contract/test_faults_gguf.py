"""GGUF files that are wrong, through a real daemon: each is refused by name and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.errors import CheckpointError
from preload.engine.recipe import Recipe

F32, Q4_0, Q8_0, IQ2_XS = 0, 2, 8, 17
GOOD = {"a": (F32, [4, 8], bytes(128)), "b": (Q8_0, [2, 32], bytes(68)), "c": (F32, [16], bytes(64))}

Write = Callable[..., Path]
Maker = Callable[[Path, Write], Path]
FAULTS: dict[str, tuple[Maker, tuple[str, ...]]] = {}


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()


def fault(*words: str) -> Callable[[Maker], Maker]:
    """Registers a maker under its function's name; `words` must be in the message."""

    def register(make: Maker) -> Maker:
        FAULTS[make.__name__] = (make, words)
        return make

    return register


def cut(path: Path, num_bytes: int) -> Path:
    os.truncate(path, path.stat().st_size - num_bytes)
    return path


@fault("'c'", "past the end of the file", "truncated")
def truncated_file(path: Path, write: Write) -> Path:
    return cut(write(path, GOOD), 40)


@fault("truncated", "header is longer than the file")
def file_that_ends_in_its_header(path: Path, write: Write) -> Path:
    write(path, GOOD)
    os.truncate(path, 80)
    return path


@fault("is not a GGUF file", "GGML")
def bad_magic(path: Path, write: Write) -> Path:
    return write(path, GOOD, magic=b"GGML")


@fault("big-endian")
def big_endian_file(path: Path, write: Write) -> Path:
    write(path, GOOD)
    data = bytearray(path.read_bytes())
    data[4:8] = bytes(reversed(data[4:8]))
    path.write_bytes(data)
    return path


@fault("GGUF version 9")
def unknown_version(path: Path, write: Write) -> Path:
    write(path, GOOD)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"\x09\0\0\0")
    return path


@fault("'b'", "type 17 (IQ2_XS)", "requantize")
def unsupported_type(path: Path, write: Write) -> Path:
    return write(path, {**GOOD, "b": (IQ2_XS, [2, 256], bytes(148))})


@fault("'b'", "type 999 (UNKNOWN)")
def unknown_type(path: Path, write: Write) -> Path:
    return write(path, {**GOOD, "b": (999, [2, 256], bytes(148))})


@fault("'c'", "past the end of the file")
def tensor_past_the_end(path: Path, write: Write) -> Path:
    return write(path, {**GOOD, "c": (F32, [1 << 20], bytes(64))})


@fault("'c'")
def offset_past_the_end(path: Path, write: Write) -> Path:
    return write(path, GOOD, offsets={"c": 1 << 40})


@fault("'c'", "overlaps the one before it")
def offsets_that_overlap(path: Path, write: Write) -> Path:
    return write(path, GOOD, offsets={"c": 160})


@fault("'c'", "leaves a hole")
def offsets_that_leave_a_hole(path: Path, write: Write) -> Path:
    return write(path, GOOD, offsets={"c": 288})


@fault("trailing bytes")
def trailing_bytes(path: Path, write: Write) -> Path:
    write(path, GOOD)
    with path.open("ab") as file:
        file.write(bytes(100))
    return path


@fault("'b'", "rows of 40 values, not a multiple of Q4_0's block of 32")
def rows_that_do_not_fit_the_blocks(path: Path, write: Write) -> Path:
    return write(path, {**GOOD, "b": (Q4_0, [2, 40], bytes(64))})


@fault("'a'", "dimensions")
def too_many_dimensions(path: Path, write: Write) -> Path:
    return write(path, {**GOOD, "a": (F32, [1, 1, 1, 4, 8], bytes(128))})


@fault("alignment")
def impossible_alignment(path: Path, write: Write) -> Path:
    return write(path, GOOD, metadata={"general.alignment": 24})


@fault("truncated", "header is longer than the file")
def string_longer_than_the_file(path: Path, write: Write) -> Path:
    """Its length would take all memory if it were believed."""
    write(path, GOOD)
    data = bytearray(path.read_bytes())
    data[24:32] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(data)
    return path


@fault(f"claims {1 << 62} tensors", "over the limit")
def more_tensors_than_the_file_can_hold(path: Path, write: Write) -> Path:
    write(path, GOOD)
    data = bytearray(path.read_bytes())
    data[8:16] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(data)
    return path


@fault("git-lfs pointer")
def git_lfs_pointer(path: Path, write: Write) -> Path:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    return path


@fault("one of 3 parts of a split GGUF")
def one_part_of_a_split_file(path: Path, write: Write) -> Path:
    return write(path, GOOD, metadata={"split.count": 3})


@fault("holds no tensors")
def file_without_tensors(path: Path, write: Write) -> Path:
    return write(path, {})


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_faulty_gguf_is_refused_by_name_and_leaves_nothing(
    daemon: Any, tmp_path: Path, write_gguf: Write, name: str, raw_checkpoint: Path,
    check_refusal: Callable[..., None],
) -> None:  # fmt: skip
    make, words = FAULTS[name]
    path = make(tmp_path / "model.gguf", write_gguf)
    check_refusal(daemon, path, CheckpointError, ("model.gguf", *words), raw_checkpoint, model="raw")


def test_a_gguf_whose_metadata_names_no_model_is_refused(
    daemon: Any, tmp_path: Path, write_gguf: Write, raw_checkpoint: Path, check_refusal: Callable[..., None]
) -> None:
    path = write_gguf(tmp_path / "model.gguf", GOOD)
    check_refusal(daemon, path, CheckpointError, ("model.gguf", "hidden_size=None"), raw_checkpoint)
    other = write_gguf(tmp_path / "other.gguf", GOOD, metadata={"general.architecture": "mamba"})
    check_refusal(daemon, other, CheckpointError, ("other.gguf", "mamba"), raw_checkpoint)


def test_a_good_gguf_keeps_its_blocks_and_its_odd_shapes(daemon: Any, tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        {"block": (Q8_0, [2, 64], bytes(range(136))), "empty": (F32, [0], b""), "scalar": (F32, [], bytes(4))},
    )
    daemon.load(path, model="raw")
    with attach(path, recipe=Recipe(model="raw"), runtime_dir=str(daemon.runtime_dir), tensors="numpy") as found:
        assert found.layouts["block"] == "gguf.q8_0"
        assert found.tensors["block"].shape == (2, 68)
        assert found.tensors["block"].tobytes() == bytes(range(136))
        assert (found.tensors["empty"].shape, found.tensors["scalar"].shape) == ((0,), ())
