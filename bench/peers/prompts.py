"""Prompts with an exact number of tokens, made of the shipped prose: its sentences in another order for each seed.

Each begins with a number of its own, so that no two share a beginning that could be cached. Counts are those of the
checkpoint's own tokenizer; every server's count is compared with them by the load generator.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from preload.bench.processes import BenchError
from preload.engine.frontend.tokenizer_files import load_tokenizer

PROSE = Path(__file__).parents[1] / "prose.txt"
_FILLER = "so"
_MAX_REPAIRS = 20


class Prompts:
    """Texts for one checkpoint's tokenizer."""

    def __init__(self, checkpoint: str) -> None:
        self._tokenizer = load_tokenizer(checkpoint)
        self._sentences = re.split(r"(?<=[.!?])\s+", PROSE.read_text().strip())
        self._lengths: dict[str, int] = {}

    def count(self, text: str) -> int:
        """Tokens of a whole prompt, as a server counts them."""
        return len(self._tokenizer.encode(text, add_special=True))

    def text(self, num_tokens: int, seed: str, after: str = "") -> str:
        """`after`, continued so that both together have `num_tokens` tokens."""
        words: list[str] = []
        num_left = num_tokens - (self.count(after) if after else 0)
        for word in self._words(seed):
            length = self._length(word)
            if length > num_left:
                break
            words.append(word)
            num_left -= length
        return self._repaired([after, *words] if after else words, num_tokens)

    def _repaired(self, words: list[str], num_tokens: int) -> str:
        """Words were counted one by one; the first has no space before it, and the last may have been too long."""
        for _ in range(_MAX_REPAIRS):
            text = " ".join(words)
            difference = num_tokens - self.count(text)
            if difference == 0:
                return text
            words = words + [_FILLER] * difference if difference > 0 else words[:-1]
        raise BenchError(f"no text of exactly {num_tokens} tokens was found")

    def _words(self, seed: str) -> Iterator[str]:
        order = random.Random(seed)
        yield f"{order.randrange(10**9)}."
        while True:
            for sentence in order.sample(self._sentences, len(self._sentences)):
                yield from sentence.split()

    def _length(self, word: str) -> int:
        known = self._lengths.get(word)
        if known is None:
            known = self._lengths[word] = len(self._tokenizer.encode(f" {word}", add_special=False))
        return known
