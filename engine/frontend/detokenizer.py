"""`Detokenizer`: the text of a growing list of tokens, handed out without ever splitting a character.

The concatenation of all it hands out equals the decoding of all bytes at once, with ill-formed parts replaced.
"""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One sample's text. Continues a prompt: no leading space is stripped."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decoder = _DECODER(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters this token completes; empty in the middle of one."""
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """What is left of a character that was never completed: a replacement character, or nothing."""
        return self._decoder.decode(b"", final=True)
