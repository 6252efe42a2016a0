"""Grammars: compiled forms, and where each request's output is in its own.

Owns the vocabulary as bytes, the compiler with its thread, and the compiled forms used last. A `Grammar` follows
(prompt, output_ids) of its request and holds nothing else: what another core sampled is read again from output_ids,
and a preempted request goes on where it was. Compiling is never done in a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from .structured import FormError, StructuredOutput, limits, reason, to_llguidance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

MAX_COMPILED = 64
"""Forms kept compiled; those used least recently go first."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What the token ids spell: `tokens` by id, `special_ids` never part of a text, `eos_ids` the end of one."""

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]


class Grammar:
    """One request's place in its form."""

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int]) -> None:
        self.matcher = matcher
        self._eos_ids = torch.tensor(eos_ids)
        self._num_followed = 0

    def follow(self, output_ids: Sequence[int]) -> str:
        """Takes note of what was sampled since the last call. Returns what is wrong with it, or nothing."""
        for token_id in output_ids[self._num_followed :]:
            self._num_followed += 1
            if not self.matcher.is_stopped() and not self.matcher.consume_token(token_id):
                break
        return self.error

    @property
    def error(self) -> str:
        """Why the form cannot be followed any further; mostly nothing."""
        error: str = self.matcher.get_error()
        return f"the output cannot go on in its form: {reason(error)}" if error else ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return bool(self.matcher.is_stopped())

    def end(self, logits: Tensor) -> None:
        """Leaves the end of the sequence alone in logits float32[vocab_size], whatever came before."""
        logits.fill_(-math.inf)
        logits[self._eos_ids] = 0.0


def apply_masks(logits: Tensor, grammars: Sequence[tuple[int, Grammar]]) -> None:
    """Bars what would leave the form, in place: for each (row of logits, grammar that has followed its output).

    logits: float32[num_rows, vocab_size]. A grammar whose `error` is set afterwards has left its row as it was."""
    vocab_size = logits.shape[1]
    mask = np.empty((len(grammars), -(-vocab_size // 32)), dtype=np.int32)
    for i, (_, grammar) in enumerate(grammars):
        grammar.matcher.unsafe_compute_mask_ptr(mask[i].ctypes.data, mask[i].nbytes)
    bits = np.unpackbits(mask.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    barred = torch.from_numpy(bits).view(torch.bool).logical_not_()
    for i, (row, grammar) in enumerate(grammars):
        if grammar.error:
            continue
        if grammar.is_complete:
            grammar.end(logits[row])
        else:
            logits[row].masked_fill_(barred[i], -math.inf)


class GrammarCompiler:
    """Compiles forms in a thread of its own, which is started with the first one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """For every form that is compiled from now on."""
        self._executor().submit(self._replace_vocabulary, vocabulary)

    def compile(self, form: StructuredOutput) -> Future[Grammar]:
        """A grammar at its beginning; the future raises FormError if the form cannot be compiled."""
        return self._executor().submit(self._compile, form)

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="core-grammar")
        return self._thread

    def _replace_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = None
        self._compiled.clear()

    def _compile(self, form: StructuredOutput) -> Grammar:
        if self._vocabulary is None:
            raise FormError("this core knows no vocabulary as bytes, which a structured output needs")
        known = self._compiled.pop(form, None) or self._matcher(form)
        self._compiled[form] = known
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return Grammar(known.deep_copy(), self._vocabulary.eos_ids)

    def _matcher(self, form: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._llguidance_tokenizer(), to_llguidance(form), log_level=0, limits=limits())
        if error := matcher.get_error():
            raise FormError(reason(error))
        return matcher

    def _llguidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._vocabulary is not None
        if self._tokenizer is None:
            vocabulary = _Wrapper(self._vocabulary, self._vocab_size)
            self._tokenizer = LLTokenizer(
                cast("TokenizerWrapper", vocabulary),
                n_vocab=self._vocab_size,
                eos_token=list(self._vocabulary.eos_ids),
            )
        return self._tokenizer


class _Wrapper:
    """A vocabulary as llguidance wants tokenizers to look. Ids of the model without a token spell nothing."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.tokens = [*vocabulary.tokens[:vocab_size], *[b""] * (vocab_size - len(vocabulary.tokens))]
        self.special_token_ids = sorted(i for i in vocabulary.special_ids if i < vocab_size)
        self.eos_token_id = vocabulary.eos_ids[0]
        special = vocabulary.special_ids
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell `text`, the longest ones first: asked for where only one text can follow. Any that spell
        it will do, since what the model may choose does not depend on them."""
        data, ids, start = text.encode(), [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids
