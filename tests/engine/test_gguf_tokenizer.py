"""Tokenizers built from GGUF metadata against reference ids, the library's own pipelines, and the algorithm."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import SentencePieceBPETokenizer, pre_tokenizers

from preload.engine.frontend.errors import StartError
from preload.engine.frontend.gguf_tokenizer import gguf_tokenizer
from preload.engine.frontend.tokenizer import Tokenizer
from preload.engine.frontend.tokenizer_files import load_tokenizer
from preload.engine.loading.gguf_reader import read_metadata

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2-greedy.json"
CASES = json.loads(REFERENCE.read_text())["cases"]
TEXTS = [
    "Zażółć gęślą jaźń; Привет, мир! 日本語のテキスト、한국어, العربية",
    "👩‍👩‍👧‍👦 and 🇩🇪 and é vs é",
    "  leading,   inner \t tabs\n\n\nand trailing   \n ",
    "I'm we'll THEY'D can't 1234567 3.14159 x2y a_b-c",
    "def f(x):\n    return [x**2 for _ in range(10)]  # ok\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x01\x7f\u200b\ufeff",
    "",
]
# The demo's vocabulary has no token for the bytes of some control characters and of planes 4 and above.
characters = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])
texts = st.one_of(
    st.text(characters, max_size=40),
    st.text(alphabet="aA1 2'st\n\t.,é日", max_size=40),
)


@pytest.fixture(scope="module")
def metadata(demo_model: Path) -> dict[str, Any]:
    return read_metadata(str(demo_model))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(str(demo_model))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_prompts_have_the_reference_ids(tokenizer: Tokenizer, case: Mapping[str, Any]) -> None:
    assert tokenizer.encode(case["prompt"], add_special=True) == case["prompt_ids"]
    assert tokenizer.decode(case["greedy_ids"], skip_special=False) == case["text"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_ids(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=True)
    assert tokenizer.decode(ids, skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_random_text_comes_back_from_its_ids(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=True)
    assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("gpt-2", [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ("smollm", [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]),
    ],
)
def test_splitting_equals_the_library_s_own_pipeline(metadata: dict[str, Any], name: str, library: list[Any]) -> None:
    ours = gguf_tokenizer({**metadata, "tokenizer.ggml.pre": name}, path="x")
    theirs = gguf_tokenizer(metadata, path="x")
    theirs.rust.pre_tokenizer = pre_tokenizers.Sequence(library)

    @settings(max_examples=200, deadline=None)
    @given(text=texts)
    def check(text: str) -> None:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special=False)

    check()
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special=False)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama-bpe", "We'LL pay 12345 \n\n ok", ["We", "'LL", " pay", " ", "123", "45", " \n\n", " ok"]),
        ("qwen2", "We'LL pay 123", ["We", "'LL", " pay", " ", "1", "2", "3"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
    ],
)
def test_named_pre_tokenizers_split_as_their_models_expect(
    metadata: dict[str, Any], name: str, text: str, words: list[str]
) -> None:
    splitter = gguf_tokenizer({**metadata, "tokenizer.ggml.pre": name}, path="x").rust.pre_tokenizer
    split = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in splitter.pre_tokenize_str(text)]
    assert split == words


def test_the_demo_model_s_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.bos_id == 1
    assert tokenizer.vocab_size == 49152
    assert tokenizer.model_max_length == 8192
    assert tokenizer.encode("<|im_end|>", add_special=False) == [2]
    assert tokenizer.decode([504, 2]) == "The"
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"


def test_begin_and_end_are_added_where_the_file_says_so(metadata: dict[str, Any]) -> None:
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = gguf_tokenizer({**metadata, **flags}, path="x")
    assert tokenizer.encode("The", add_special=True) == [1, 504, 2]
    assert tokenizer.encode("The", add_special=False) == [504]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "nobody-knows"}, "nobody-knows.*--tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*--tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing.*--tokenizer"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "holds 'ab'"),
        ({"tokenizer.ggml.merges": ["Ġ neverseen"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 49152"),
        ({"tokenizer.ggml.eos_token_id": 50000}, "eos_token_id is 50000"),
    ],
)
def test_wrong_metadata_is_refused_naming_file_and_key(
    metadata: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartError, match=message):
        gguf_tokenizer({**metadata, **change}, path="some/file.gguf")


SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    """Metadata of a small SentencePiece vocabulary, trained on the reference texts."""
    trained = SentencePieceBPETokenizer()
    corpus = [case["prompt"] + case["text"] for case in CASES] * 2
    trained.train_from_iterator(corpus, vocab_size=220, min_frequency=2, show_progress=False)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    pieces = [piece for piece in pieces if piece not in ("<unk>", "\n")]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, "<turn>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0, 0.0, 0.0, *[0.0] * 256, *(-float(i) for i in range(len(pieces))), 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def merge_greedily(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's algorithm, as slow as it is plain: merge the neighbours with the best score, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    score = {
        token: metadata["tokenizer.ggml.scores"][i]
        for token, i in ids.items()
        if metadata["tokenizer.ggml.token_type"][i] == 1
    }
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols))
                 if a + b in score and a in score and b in score]  # fmt: skip
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found: list[int] = []
    for symbol in symbols:
        found.extend([ids[symbol]] if symbol in score else [ids[BYTES[byte]] for byte in symbol.encode()])
    return found


def test_sentencepiece_merging_equals_the_plain_algorithm(sentencepiece: dict[str, Any]) -> None:
    tokenizer = gguf_tokenizer(sentencepiece, path="x")

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(alphabet="theinaso rdlfcu.,\nTé日👍", max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == merge_greedily(sentencepiece, text)
        assert tokenizer.decode(ids) == text

    check()
    assert any(len(tokenizer.rust.id_to_token(i)) > 3 for i in tokenizer.encode("the old wizard", add_special=False))


def test_sentencepiece_prompts_begin_with_bos_and_find_added_tokens(sentencepiece: dict[str, Any]) -> None:
    tokenizer = gguf_tokenizer(sentencepiece, path="x")
    turn = len(sentencepiece["tokenizer.ggml.tokens"]) - 1
    ids = tokenizer.encode("<turn>the", add_special=True)
    assert ids[:2] == [1, turn]
    assert tokenizer.decode(ids) == "<turn> the"


def test_without_a_space_prefix_nothing_is_added_and_nothing_stripped(sentencepiece: dict[str, Any]) -> None:
    tokenizer = gguf_tokenizer({**sentencepiece, "tokenizer.ggml.add_space_prefix": False}, path="x")
    for text in ("the", " the", "  the"):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids) == text
    assert not tokenizer.rust.id_to_token(tokenizer.encode("the", add_special=False)[0]).startswith(SPACE)
