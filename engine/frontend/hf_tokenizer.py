"""Tokenizers from Hugging Face's files: tokenizer.json, and beside it tokenizer_config.json,
generation_config.json, config.json and chat_template.jinja.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import StartError
from .tokenizer import Tokenizer, TokenToBytes, byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def hf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in file `path`. Raises StartError naming the file that is missing or wrong."""
    from tokenizers import Tokenizer as RustTokenizer

    description = _read_json(path)
    if description is None:
        raise StartError(f"{path} does not exist; pass --tokenizer with the model's tokenizer.json")
    try:
        rust = RustTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise StartError(f"{path} is not a tokenizer this version reads: {error}") from error
    rust.no_truncation()
    rust.no_padding()
    settings = _read_json(path.with_name("tokenizer_config.json")) or {}
    added = {index: token.content for index, token in rust.get_added_tokens_decoder().items()}
    special = {index for index, token in rust.get_added_tokens_decoder().items() if token.special}
    names = _special_tokens(settings)
    token_to_bytes, strips = _spelling(description, path)
    bos = names.get("bos_token")
    return Tokenizer(
        rust=rust,
        token_to_bytes=token_to_bytes,
        added=added,
        special_ids=frozenset(special),
        eos_ids=_eos_ids(path.parent, rust, names),
        bos_id=rust.token_to_id(bos) if bos else None,
        library_adds_special=True,
        strip_leading_space=strips,
        chat_template=_chat_template(path.parent, settings),
        special_tokens=names,
        model_max_length=_model_max_length(path.parent),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{path} must hold a JSON object")
    return value


def _decoders(description: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    decoder = description.get("decoder") or {}
    yield from decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)


def _spelling(description: Mapping[str, Any], path: Path) -> tuple[TokenToBytes, bool]:
    """How tokens become bytes, and whether a text's leading space is an artefact."""
    decoders = list(_decoders(description))
    types = {str(decoder.get("type")) for decoder in decoders}
    if "ByteLevel" in types and types <= {"ByteLevel"}:
        return byte_level_bytes, False
    if types & {"ByteFallback", "Metaspace"} and types <= {
        "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace",
    }:  # fmt: skip
        prepends = any(
            decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme") != "never" for decoder in decoders
        )
        return sentencepiece_bytes, prepends or "Strip" in types
    raise StartError(
        f"{path}: the decoder ({', '.join(sorted(types))}) is neither byte-level nor SentencePiece; "
        "such vocabularies are not supported"
    )


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(settings.get(name)) for name in _SPECIAL_NAMES}
    return {name: content for name, content in named.items() if content is not None}


def _eos_ids(folder: Path, rust: RustTokenizer, names: Mapping[str, str]) -> tuple[int, ...]:
    """Ids of generation_config.json, or else of config.json, and the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = (_read_json(folder / name) or {}).get("eos_token_id")
        if value is not None:
            ids.extend(value if isinstance(value, list) else [value])
            break
    own = rust.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if own is not None:
        ids.append(own)
    return tuple(dict.fromkeys(int(index) for index in ids))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over the key of tokenizer_config.json; of several named ones "default" counts."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise StartError(f"{path} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _model_max_length(folder: Path) -> int:
    value = (_read_json(folder / "config.json") or {}).get("max_position_embeddings")
    return value if isinstance(value, int) else 0
