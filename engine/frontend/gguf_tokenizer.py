"""Tokenizers from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Source: the GGUF specification's tokenizer keys; token types 1 normal, 2 unknown, 3 control, 4 user defined,
5 unused, 6 byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from .errors import StartError
from .pretokenizers import ADD_BOS_BY_DEFAULT, WHOLE_WORDS_FIRST, byte_level_pre_tokenizer
from .tokenizer import Tokenizer, byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_KEY = "tokenizer.ggml."
_END_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
"""Control tokens that end a turn whatever the file names as its end of sequence."""


def gguf_tokenizer(metadata: Mapping[str, Any], *, path: str) -> Tokenizer:
    """The tokenizer a GGUF file describes. Raises StartError naming `path` and the key that is wrong."""
    tokens: Sequence[str] = _array(metadata, "tokens", path)
    types: Sequence[int] = metadata.get(f"{_KEY}token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise StartError(f"{path}: {_KEY}token_type has {len(types)} entries for {len(tokens)} tokens")
    model = metadata.get(f"{_KEY}model")
    if model == "gpt2":
        rust, add_bos = _byte_level(metadata, tokens, path)
    elif model == "llama":
        rust, add_bos = _sentencepiece(metadata, tokens, types, path), True
    else:
        raise StartError(
            f"{path}: {_KEY}model is {model!r}; known are gpt2 and llama. Pass --tokenizer with a tokenizer.json"
        )
    added = _add_tokens(rust, tokens, types)
    byte_level = model == "gpt2"
    bos_id = _special_id(metadata, "bos_token_id", len(tokens), path)
    return Tokenizer(
        rust=rust,
        token_to_bytes=byte_level_bytes if byte_level else sentencepiece_bytes,
        added=added,
        special_ids=frozenset(i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)),
        eos_ids=_eos_ids(metadata, tokens, types, path),
        bos_id=bos_id,
        add_bos=bool(metadata.get(f"{_KEY}add_bos_token", add_bos)),
        add_eos=bool(metadata.get(f"{_KEY}add_eos_token", False)),
        strip_leading_space=not byte_level and _adds_space(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=_named_tokens(metadata, tokens, path),
        model_max_length=int(metadata.get(f"{metadata.get('general.architecture')}.context_length") or 0),
    )


def _array(metadata: Mapping[str, Any], name: str, path: str) -> Any:
    value = metadata.get(_KEY + name)
    if value is None:
        raise StartError(f"{path}: {_KEY}{name} is missing, so the file has no tokenizer; pass --tokenizer with one")
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], path: str) -> tuple[RustTokenizer, bool]:
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import models

    pre = metadata.get(f"{_KEY}pre") or "default"
    lines: Sequence[str] = _array(metadata, "merges", path)
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    try:
        model = models.BPE(vocab, _Merges(lines), ignore_merges=pre in WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises nothing narrower
        _check_merges(lines, path)
        raise StartError(f"{path}: {_KEY}merges do not fit {_KEY}tokens: {error}") from error
    rust = RustTokenizer(model)
    rust.pre_tokenizer = byte_level_pre_tokenizer(pre)
    return rust, pre in ADD_BOS_BY_DEFAULT


class _Merges(Sequence[tuple[str, str]]):
    """Pairs of tokens out of lines. There are as many as tokens: they are made one by one, and none is kept."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Any]:
        return map(tuple, map(methodcaller("split", " ", 1), self._lines))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def _check_merges(lines: Sequence[str], path: str) -> None:
    """Raises StartError naming a line that is no merge."""
    for line in lines:
        if not all(line.partition(" ")):
            raise StartError(f"{path}: {_KEY}merges holds {line!r}; a merge is two tokens with a space between")


def _adds_space(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get(f"{_KEY}add_space_prefix", True))


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: str
) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import models, normalizers

    scores: Sequence[float] = _array(metadata, "scores", path)
    if len(scores) != len(tokens):
        raise StartError(f"{path}: {_KEY}scores has {len(scores)} entries for {len(tokens)} tokens")
    mergeable = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    vocab = {token: index for index, token in enumerate(tokens)}
    rust = RustTokenizer(
        models.BPE(
            vocab,
            list(_merges_by_score(mergeable, scores)),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if _adds_space(metadata):
        steps.insert(0, normalizers.Prepend("\u2581"))
    rust.normalizer = normalizers.Sequence(steps)
    return rust


def _merges_by_score(mergeable: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """The merges SentencePiece's greedy algorithm makes: any two pieces whose union is a piece, best score first."""
    for token in sorted(mergeable, key=lambda token: (-scores[mergeable[token]], mergeable[token])):
        splits = [
            (mergeable[token[:cut]], mergeable[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in mergeable and token[cut:] in mergeable
        ]
        for _, _, cut in sorted(splits):
            yield token[:cut], token[cut:]


def _add_tokens(rust: RustTokenizer, tokens: Sequence[str], types: Sequence[int]) -> dict[int, str]:
    """Control and user-defined tokens are found in texts before any splitting. Returns those spelled literally."""
    from tokenizers import AddedToken

    added: dict[int, str] = {}
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for index in [i for i, kind in enumerate(types) if kind != _NORMAL]:
        kind = types[index]
        if kind in (_CONTROL, _USER_DEFINED) and tokens[index]:
            added[index] = tokens[index]
            into = special if kind == _CONTROL else plain
            into.append(AddedToken(tokens[index], special=kind == _CONTROL, normalized=False))
    rust.add_special_tokens(special)
    rust.add_tokens(plain)
    return added


def _special_id(metadata: Mapping[str, Any], name: str, vocab_size: int, path: str) -> int | None:
    value = metadata.get(_KEY + name)
    if value is None or value == 0xFFFFFFFF:
        return None
    if not 0 <= value < vocab_size:
        raise StartError(f"{path}: {_KEY}{name} is {value}; the vocabulary has {vocab_size} tokens")
    return int(value)


def _eos_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: str) -> tuple[int, ...]:
    named = [_special_id(metadata, name, len(tokens), path) for name in ("eos_token_id", "eot_token_id")]
    control = [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_NAMES]
    return tuple(dict.fromkeys(i for i in [*named, *control] if i is not None))


def _named_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], path: str) -> dict[str, str]:
    """What chat templates call bos_token and so on."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _special_id(metadata, f"{key}_token_id", len(tokens), path) for name, key in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}
