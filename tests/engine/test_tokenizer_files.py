"""Which file the tokenizer of a checkpoint is read from: told by content, as the loader tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from preload.engine.errors import CheckpointError
from preload.engine.frontend.errors import StartError
from preload.engine.frontend.tokenizer_files import load_tokenizer
from preload.engine.loading.checkpoint import open_checkpoint


@pytest.mark.parametrize("name", ["blob", "model.bin.txt", "model.gguf"])
def test_a_gguf_of_any_name_has_its_own_tokenizer(tmp_path: Path, demo_model: Path, name: str) -> None:
    path = tmp_path / name
    path.symlink_to(demo_model)
    checkpoint = open_checkpoint(str(path))
    checkpoint.close()
    assert checkpoint.format == "gguf"
    assert load_tokenizer(str(path)).rust.get_vocab_size() == 49152


def test_what_is_named_gguf_and_is_none_is_refused_by_both(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=str(path)):
        open_checkpoint(str(path))
    with pytest.raises(StartError, match=f"{path} is not a GGUF file"):
        load_tokenizer(str(path))


def test_a_gguf_beside_the_weights_that_are_loaded_is_not_asked(tmp_path: Path, demo_model: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "other.gguf").symlink_to(demo_model)
    with pytest.raises(StartError, match=str(tmp_path / "tokenizer.json")):
        load_tokenizer(str(tmp_path))
