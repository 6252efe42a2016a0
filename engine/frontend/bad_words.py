"""`bad_words` as token ids: each word as it begins a text, and as it stands after a blank."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens to be barred. Other tokens that spell the same word are not, as in vLLM, whose rule
    this is: the second spelling counts only if it is as long as the first and begins otherwise, since else its
    blank is a token of its own and the word after it is spelled as in the first."""
    sequences: list[tuple[int, ...]] = []
    for word in words:
        at_start = tokenizer.encode(word, add_special=False)
        after_blank = tokenizer.encode(" " + word.lstrip(), add_special=False)
        sequences.append(tuple(at_start))
        if after_blank and len(after_blank) == len(at_start) and after_blank[0] != at_start[0]:
            sequences.append(tuple(after_blank))
    return tuple(sequence for sequence in dict.fromkeys(sequences) if sequence)
