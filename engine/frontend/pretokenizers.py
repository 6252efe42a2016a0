"""How texts are split into words before byte-pair merging, by the name a GGUF file gives (`tokenizer.ggml.pre`).

The names and patterns are those of the original tokenizers; a name that is not here is refused, because another
split gives other tokens, which a model reads without complaint and answers badly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import StartError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_PATTERNS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais"): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): (_LLAMA3,),
    ("qwen2", "stablelm2", "deepseek-r1-qwen"): (_QWEN2,),
    ("tekken",): (_TEKKEN,),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_BY_NAME = {name: patterns for names, patterns in _PATTERNS.items() for name in names}

WHOLE_WORDS_FIRST = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))
"""Vocabularies in which a word that is a token is taken whole, even where merges would not lead there."""

ADD_BOS_BY_DEFAULT = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"))
"""Vocabularies whose prompts begin with the begin-of-text token unless the file says otherwise."""


def byte_level_pre_tokenizer(name: str) -> PreTokenizer:
    """Splits in order, each one's matches isolated, then spells bytes. Raises StartError for an unknown name."""
    patterns = _BY_NAME.get(name)
    if patterns is None:
        raise StartError(
            f"the GGUF file names the pre-tokenizer {name!r}, which is not known here (known are "
            f"{', '.join(sorted(_BY_NAME))}); pass --tokenizer with the model's tokenizer.json"
        )
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
