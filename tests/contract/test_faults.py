"""Checkpoints that are wrong, through a real daemon: each is refused by name and leaves nothing behind.

Safetensors and what belongs to them; GGUF files and loaders that come to grief have modules of their own.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preload.engine.errors import CheckpointError, CheckpointNotFoundError, PreloadError

NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()


@dataclass
class Fault:
    """How to make it, the error it must raise, and what its message must say."""

    make: Callable[[Any], Path]
    error: type[PreloadError]
    words: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def fault(*words: str, error: type[PreloadError] = CheckpointError) -> Callable[..., Callable[[Any], Path]]:
    """Registers a maker under its function's name."""

    def register(make: Callable[[Any], Path]) -> Callable[[Any], Path]:
        FAULTS[make.__name__] = Fault(make, error, words)
        return make

    return register


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@fault("model.safetensors", LM_HEAD, "truncated")
def truncated_file(files: Any) -> Path:
    folder = files.model()
    os.truncate(files.weights, files.weights.stat().st_size - 100)
    return folder


@fault("raw.safetensors", "truncated", "no header")
def file_shorter_than_any_header(files: Any) -> Path:
    path = files.folder / "raw.safetensors"
    path.write_bytes(b"\x08\0\0")
    return path


@fault("raw.safetensors", "header of 5000 bytes is longer than the file")
def header_longer_than_the_file(files: Any) -> Path:
    return files.header({"a": entry(0, 64)}, num_bytes=5000)


@fault("raw.safetensors", "header of 200000000 bytes, over the limit of 100000000")
def header_over_100_mb(files: Any) -> Path:
    path = files.header(b"{}", num_bytes=200_000_000)
    os.truncate(path, 300_000_000)
    return path


@fault("raw.safetensors", "header", "JSON")
def header_not_json(files: Any) -> Path:
    return files.header(b'{"a": {"dtype": "F32", "shape": [16], ')


@fault("raw.safetensors", "header", "object")
def header_not_an_object(files: Any) -> Path:
    return files.header([1, 2])


@fault("raw.safetensors", "'a'")
def header_naming_a_tensor_twice(files: Any) -> Path:
    one = json.dumps(entry(0, 32)).encode()
    return files.header(b'{"a": ' + one + b', "a": ' + json.dumps(entry(32, 64)).encode() + b"}")


@fault("raw.safetensors", "'b'", "overlaps the one before it by 8 bytes")
def offsets_that_overlap(files: Any) -> Path:
    return files.header({"a": entry(0, 40), "b": entry(32, 64)})


@fault("raw.safetensors", "'b'", "leaves a hole of 16 bytes")
def offsets_that_leave_a_hole(files: Any) -> Path:
    return files.header({"a": entry(0, 32), "b": entry(48, 64)})


@fault("raw.safetensors", "'a'", "leaves a hole of 16 bytes")
def offsets_that_begin_late(files: Any) -> Path:
    return files.header({"a": entry(16, 64)})


@fault("raw.safetensors", "'b'", "past the end of the file")
def offsets_that_pass_the_end(files: Any) -> Path:
    return files.header({"a": entry(0, 32), "b": entry(32, 96)})


@fault("raw.safetensors", "'a'", "data_offsets")
def offsets_that_run_backwards(files: Any) -> Path:
    return files.header({"a": {"dtype": "F32", "shape": [0], "data_offsets": [64, 0]}})


@fault("raw.safetensors", "'a'", "data_offsets")
def offsets_that_are_negative(files: Any) -> Path:
    return files.header({"a": entry(-64, 0, shape=[16])})


@fault("raw.safetensors", "'a'", "64 bytes, but F32 [4, 5] needs 80")
def bytes_that_do_not_fit_the_shape(files: Any) -> Path:
    return files.header({"a": entry(0, 64, shape=[4, 5])})


@fault("raw.safetensors", "24 trailing bytes")
def trailing_bytes(files: Any) -> Path:
    return files.header({"a": entry(0, 40)})


@fault("raw.safetensors", "'a'", "unknown dtype 'F5'")
def unknown_dtype(files: Any) -> Path:
    return files.header({"a": entry(0, 64, dtype="F5")})


@fault("holds no tensors")
def file_without_tensors(files: Any) -> Path:
    return files.header({}, data=b"")


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"


@fault("model.safetensors", "git-lfs pointer", "git lfs pull")
def git_lfs_pointer_instead_of_weights(files: Any) -> Path:
    folder = files.model()
    files.weights.write_bytes(LFS_POINTER)
    return folder


@fault("config.json", "git-lfs pointer")
def git_lfs_pointer_instead_of_a_config(files: Any) -> Path:
    folder = files.model()
    (folder / "config.json").write_bytes(LFS_POINTER)
    return folder


def sharded(files: Any) -> tuple[Path, Path, Path]:
    """A folder of two shards, and the two."""
    folder = files.llama.sharded(files.folder, files.llama.tensors())
    first, second = (folder / f"model-{i:05}-of-00002.safetensors" for i in (1, 2))
    return folder, first, second


@fault("model-00002-of-00002.safetensors", "missing", "model.safetensors.index.json names it",
       error=CheckpointNotFoundError)  # fmt: skip
def shard_that_the_index_names_is_missing(files: Any) -> Path:
    folder, _, second = sharded(files)
    second.unlink()
    return folder


@fault("model-00001-of-00002.safetensors", "'extra'", "is not named by model.safetensors.index.json")
def tensor_in_a_shard_that_the_index_does_not_name(files: Any) -> Path:
    folder, first, _ = sharded(files)
    tensors = files.llama.tensors()
    part = {name: value for i, (name, value) in enumerate(tensors.items()) if i % 2 == 0}
    files.write(first, {**part, "extra": ("F32", [4], bytes(16))})
    return folder


@fault("model-00001-of-00002.safetensors", "'model.embed_tokens.weight'", "index.json names it here")
def tensor_that_the_index_names_is_not_in_its_shard(files: Any) -> Path:
    folder, first, _ = sharded(files)
    part = {name: value for i, (name, value) in enumerate(files.llama.tensors().items()) if i % 2 == 0}
    del part["model.embed_tokens.weight"]
    files.write(first, part)
    return folder


@fault("model-00002-of-00002.safetensors", f"'{NORM}'", "is also in", "model-00001-of-00002.safetensors")
def same_tensor_in_two_shards(files: Any) -> Path:
    folder, first, second = sharded(files)
    tensors = files.llama.tensors()
    items = list(tensors.items())
    files.write(first, dict(items[0::2]) | {NORM: tensors[NORM]})
    files.write(second, dict(items[1::2]) | {NORM: tensors[NORM]})
    return folder


@fault("model.safetensors.index.json", "'../../etc/passwd.safetensors'")
def index_that_leads_out_of_its_folder(files: Any) -> Path:
    folder, _, _ = sharded(files)
    index = {"weight_map": {NORM: "../../etc/passwd.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@fault("model.safetensors", f"'{Q_PROJ}'", "has shape [64, 32]", "needs [64, 64]", "config.json")
def wrong_shape_for_the_model(files: Any) -> Path:
    return files.model(lambda tensors: tensors.update({Q_PROJ: ("F32", [64, 32], bytes(64 * 32 * 4))}))


@fault(f"'{Q_PROJ}'", "is missing", "config.json")
def missing_tensor(files: Any) -> Path:
    return files.model(lambda tensors: tensors.pop(Q_PROJ))


@fault("model.safetensors", "'model.layers.0.self_attn.q_proj.bias'", "is unexpected")
def unexpected_tensor(files: Any) -> Path:
    name = "model.layers.0.self_attn.q_proj.bias"
    return files.model(lambda tensors: tensors.update({name: ("F32", [64], bytes(256))}))


@fault(f"'{LM_HEAD}'", "is missing, though tie_word_embeddings is false")
def output_missing_though_it_is_not_tied(files: Any) -> Path:
    return files.model(lambda tensors: tensors.pop(LM_HEAD))


@fault("model.safetensors", f"'{LM_HEAD}'", "differs from model.embed_tokens.weight")
def tied_output_that_differs(files: Any) -> Path:
    return files.model(tie_word_embeddings=True)


@fault("pytorch_model.bin", "pickle", "convert it to safetensors")
def folder_of_pickles(files: Any) -> Path:
    files.model()
    files.weights.unlink()
    (files.folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    return files.folder


@fault("weights.pt", "pickle")
def pickle_by_name(files: Any) -> Path:
    path = files.folder / "weights.pt"
    path.write_bytes(pickle.dumps({"a": 1}))
    return path


@fault("model.safetensors", "pickle", "by its content")
def pickle_under_the_name_of_safetensors(files: Any) -> Path:
    folder = files.model()
    files.weights.write_bytes(pickle.dumps(list(range(100))))
    return folder


@fault("model.safetensors", "broken symbolic link to /nowhere/blob", error=CheckpointNotFoundError)
def broken_symlink_in_the_folder(files: Any) -> Path:
    folder = files.model()
    files.weights.unlink()
    files.weights.symlink_to("/nowhere/blob")
    return folder


@fault("model.safetensors is not a regular file", error=CheckpointNotFoundError)
def folder_in_place_of_a_file(files: Any) -> Path:
    folder = files.model()
    files.weights.unlink()
    files.weights.mkdir()
    return folder


@fault("model.safetensors is not a regular file", error=CheckpointNotFoundError)
def pipe_in_place_of_a_file(files: Any) -> Path:
    folder = files.model()
    files.weights.unlink()
    os.mkfifo(files.weights)
    return folder


@fault("holds no .safetensors and no .gguf file", error=CheckpointNotFoundError)
def empty_folder(files: Any) -> Path:
    return files.folder


@fault("config.json does not exist", "model 'raw'", error=CheckpointNotFoundError)
def folder_without_a_config(files: Any) -> Path:
    folder = files.model()
    (folder / "config.json").unlink()
    return folder


@fault("config.json", "JSON")
def config_that_is_not_json(files: Any) -> Path:
    folder = files.model()
    (folder / "config.json").write_text("{hidden_size: 64}")
    return folder


@fault("config.json", "hidden_size=None must be a positive integer")
def config_without_a_size(files: Any) -> Path:
    return files.model(hidden_size=None)


@fault("config.json", "GPT2LMHeadModel", "not supported")
def config_of_another_architecture(files: Any) -> Path:
    return files.model(architectures=["GPT2LMHeadModel"])


@fault("'model.layers.2.", "is missing", "config.json (num_hidden_layers=3)")
def config_with_more_layers_than_there_are(files: Any) -> Path:
    return files.model(num_hidden_layers=3)


@fault("model.safetensors", "'model.layers.1.", "is unexpected", "config.json")
def config_with_fewer_layers_than_there_are(files: Any) -> Path:
    return files.model(num_hidden_layers=1)


@fault("model.safetensors", "'model.embed_tokens.weight'", "has shape [128, 64]", "vocab_size=100")
def config_that_contradicts_the_tensors(files: Any) -> Path:
    return files.model(vocab_size=100)


@fault("model.safetensors", f"'{NORM}'", "stored as int64")
def vector_of_a_dtype_that_no_norm_has(files: Any) -> Path:
    return files.model(lambda tensors: tensors.update({NORM: ("I64", [64], bytes(512))}))


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_faulty_checkpoint_is_refused_by_name_and_leaves_nothing(
    daemon: Any, files: Any, name: str, raw_checkpoint: Path, check_refusal: Callable[..., None]
) -> None:
    path = FAULTS[name].make(files)
    model = "raw" if path.name == "raw.safetensors" or path.suffix == ".pt" else "auto"
    check_refusal(daemon, path, FAULTS[name].error, FAULTS[name].words, raw_checkpoint, model=model)


def test_a_path_that_is_a_broken_link_names_its_target(daemon: Any, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/nowhere/model")
    with pytest.raises(CheckpointNotFoundError, match=f"checkpoint {link}: is a broken link to /nowhere/model"):
        daemon.load(link)
    assert daemon.device().reserved_bytes == 0
