"""Tokenizers from Hugging Face's files: ids, ends, templates, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, processors

from preload.engine.frontend.errors import StartError
from preload.engine.frontend.tokenizer import Tokenizer
from preload.engine.frontend.tokenizer_files import load_tokenizer

TEXT = "The 2nd capital of  France is 東京 🦩\n"


@pytest.fixture(scope="module")
def original(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))


@pytest.fixture
def folder(tmp_path: Path, original: Tokenizer) -> Path:
    """The demo's tokenizer as Hugging Face would store it."""
    rust = RustTokenizer.from_str(original.rust.to_str())
    rust.decoder = decoders.ByteLevel()
    rust.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}})
    write(tmp_path, "config.json", {"eos_token_id": 5, "max_position_embeddings": 2048})
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def test_a_folder_a_file_in_it_and_weights_beside_it_all_name_the_same_tokenizer(
    folder: Path, original: Tokenizer
) -> None:
    weights = folder / "model.safetensors"
    weights.touch()
    for path in (folder, folder / "tokenizer.json", weights):
        tokenizer = load_tokenizer(str(path))
        ids = tokenizer.encode(TEXT, add_special=True)
        assert ids == original.encode(TEXT, add_special=True)
        assert tokenizer.decode(ids) == TEXT
        assert tokenizer.model_max_length == 2048


def test_an_override_wins_over_the_checkpoint(folder: Path, demo_model: Path) -> None:
    assert load_tokenizer(str(demo_model), str(folder)).model_max_length == 2048


def test_end_ids_come_from_the_generation_config_then_from_the_config(folder: Path) -> None:
    assert load_tokenizer(str(folder)).eos_ids == (5, 2)
    write(folder, "generation_config.json", {"eos_token_id": [0, 2]})
    assert load_tokenizer(str(folder)).eos_ids == (0, 2)


def test_special_tokens_are_named_for_templates_and_not_shown(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.decode([1, 504, 2]) == "The"
    assert tokenizer.bos_id == 1


def test_the_post_processor_adds_begin_of_text_only_when_asked(folder: Path) -> None:
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    rust.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    rust.enable_truncation(2)
    rust.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("The capital of", add_special=True) == [1, 504, 3575, 282]
    assert tokenizer.encode("The capital of", add_special=False) == [504, 3575, 282]


def test_the_template_file_wins_over_the_named_and_the_plain_one(folder: Path) -> None:
    assert load_tokenizer(str(folder)).chat_template is None
    write(folder, "tokenizer_config.json", {"chat_template": "plain"})
    assert load_tokenizer(str(folder)).chat_template == "plain"
    named = [{"name": "rag", "template": "other"}, {"name": "default", "template": "named"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(str(folder)).chat_template == "named"
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(str(folder)).chat_template == "file"


def test_a_sentencepiece_decoder_is_known_by_its_steps(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3, "<0xC3>": 4, "<0xA9>": 5}
    rust = RustTokenizer(models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    for ids in ([3, 3], [3, 4, 5, 2], [2, 3]):
        assert tokenizer.decode(ids) == rust.decode(ids)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read as JSON"),
        ("tokenizer.json", "[]", "tokenizer.json must hold a JSON object"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read as JSON"),
        ("generation_config.json", "\x00", "generation_config.json cannot be read as JSON"),
    ],
)
def test_a_file_that_is_wrong_is_named(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(StartError, match=message):
        load_tokenizer(str(folder))


def test_a_missing_tokenizer_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json does not exist; pass --tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(StartError, match="the checkpoint /nowhere does not exist"):
        load_tokenizer("/nowhere")


def test_a_decoder_of_another_kind_is_refused(folder: Path) -> None:
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    rust.decoder = decoders.WordPiece()
    rust.save(str(folder / "tokenizer.json"))
    with pytest.raises(StartError, match="WordPiece"):
        load_tokenizer(str(folder))
