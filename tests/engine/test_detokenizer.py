"""Text handed out token by token: no character is ever split, and the whole is the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preload.engine.frontend.detokenizer import Detokenizer
from preload.engine.frontend.tokenizer import Tokenizer, byte_level_bytes, sentencepiece_bytes
from preload.engine.frontend.tokenizer_files import load_tokenizer

# The demo's vocabulary has no token for the bytes of some control characters and of planes 4 and above.
characters = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49200), max_size=60))
def test_pieces_of_random_ids_add_up_to_the_decoding_of_all(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add(token_id) for token_id in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60))
def test_decoding_equals_the_library_s(tokenizer: Tokenizer, ids: list[int]) -> None:
    from tokenizers import decoders

    tokenizer.rust.decoder = decoders.ByteLevel()
    assert tokenizer.decode(ids) == tokenizer.rust.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(characters, max_size=40))
def test_no_piece_of_a_text_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token_id) for token_id in tokenizer.encode(text, add_special=False)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert detokenizer.finish() == ""
    assert "".join(pieces) == text


def test_an_emoji_of_several_tokens_comes_out_once_and_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦩", add_special=False)
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["🦩"]


def test_a_character_that_is_never_completed_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(tokenizer.encode("🦩", add_special=False)[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_and_ids_without_a_token_have_no_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token_id) for token_id in (1, 2, 49_999, 504)] == ["", "", "", "The"]


def test_spellings_of_tokens_are_inverted() -> None:
    assert byte_level_bytes("Ġhi") == b" hi"
    assert byte_level_bytes("Ċ") == b"\n"
    assert byte_level_bytes("日") == "日".encode()
    assert sentencepiece_bytes("\u2581hi") == b" hi"
    assert sentencepiece_bytes("<0xF0>") == b"\xf0"
    assert sentencepiece_bytes("<0xZZ>") == b"<0xZZ>"
