"""`Tokenizer`: text to token ids, and each token id to its bytes.

Owns the two directions and the special ids of one vocabulary; where a vocabulary comes from is hf_tokenizer's and
gguf_tokenizer's business. Decoding is done here from the bytes of each token, not by the library, so that text can
be cut anywhere: the text of ids is the UTF-8 decoding of their bytes, one after the other, with ill-formed parts
replaced; special tokens have no bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_INLINE_CHARACTERS = 8192
"""Longer texts are encoded in a thread, so that one long prompt does not stop the streams of all others."""

TokenToBytes = Callable[[str], bytes]


@dataclass(kw_only=True, repr=False)
class Tokenizer:
    """A vocabulary ready for use.

    `token_to_bytes` inverts the vocabulary's own spelling (byte-level or SentencePiece); `added` holds the tokens
    that are spelled literally, `special_ids` those that are never shown. `eos_ids` end a sample.
    """

    rust: RustTokenizer
    token_to_bytes: TokenToBytes
    added: Mapping[int, str]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    library_adds_special: bool = False
    strip_leading_space: bool = False
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    model_max_length: int = 0
    vocab_size: int = field(init=False)
    _bytes: dict[int, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.vocab_size = self.rust.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`; `add_special` puts the model's own begin and end around them."""
        ids: list[int] = self.rust.encode(text, add_special_tokens=add_special and self.library_adds_special).ids
        if add_special and not self.library_adds_special:
            if self.add_bos and self.bos_id is not None:
                ids.insert(0, self.bos_id)
            if self.add_eos and self.eos_ids:
                ids.append(self.eos_ids[0])
        return ids

    async def encode_async(self, text: str, *, add_special: bool) -> list[int]:
        """`encode`, off the event loop when the text is long."""
        if len(text) <= _INLINE_CHARACTERS:
            return self.encode(text, add_special=add_special)
        return await asyncio.to_thread(self.encode, text, add_special=add_special)

    def bytes_of(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes a token adds to the text; empty for a special one and for an id without a token."""
        if skip_special and token_id in self.special_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        literal = self.added.get(token_id)
        if literal is not None:
            return literal.encode()
        token = self.rust.id_to_token(token_id)
        return b"" if token is None else self.token_to_bytes(token)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids` as a whole text of its own."""
        data = b"".join(self.bytes_of(token_id, skip_special=skip_special) for token_id in ids)
        text = data.decode(errors="replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable Latin-1, else U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a character outside the alphabet is spelled literally."""
    try:
        return bytes(_BYTE_LEVEL[character] for character in token)
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: `<0xNN>` is one byte, U+2581 is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes((int(token[3:5], 16),))
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()
