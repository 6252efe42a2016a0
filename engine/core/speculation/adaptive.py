"""How many tokens to guess: decided by what steps took, never by an assumption.

For each size of the batch (by powers of two) the rate of tokens per second is measured of steps with each of a few
draft lengths, 0 among them: k, (k − 1)/2, … What is best is done for REST_STEPS steps, then one of the others is
tried again for TRIAL_STEPS, since acceptance depends on the text and time on the machine. A step counts for the
longest draft there was in it, so that steps of an n-gram drafter without a match tell what plain steps take.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIAL_STEPS = 12
REST_STEPS = 200
SETTLING_STEPS = 2
"""Steps after a change that are not measured: a draft model is fed what it has missed."""

MIN_MEASURED = 4
"""Steps that make a rate."""

_KEPT = 0.97
"""Of what was measured before, each time a step is measured."""

_MOST = 2.0
"""A step counts as at most so many times the mean: having had to wait for the machine says nothing of drafts."""


@dataclass
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    num_measured: int = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        if self.known:
            seconds = min(seconds, _MOST * self.seconds / self.steps)
        self.tokens = self.tokens * _KEPT + num_tokens
        self.seconds = self.seconds * _KEPT + seconds
        self.steps = self.steps * _KEPT + 1
        self.num_measured += 1

    @property
    def known(self) -> bool:
        return self.num_measured >= MIN_MEASURED

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class _BatchSize:
    """The lengths tried at one size of the batch."""

    def __init__(self, lengths: list[int]) -> None:
        self.rates = {length: _Rate() for length in lengths}
        self.length = lengths[0]
        self._left = TRIAL_STEPS
        self._settling = SETTLING_STEPS
        self._resting = False
        self._next_trial = 0

    def measure(self, length: int, num_tokens: int, seconds: float) -> None:
        if self._settling:
            self._settling -= 1
            return
        self.rates[length].add(num_tokens, seconds)
        self._left -= 1
        if self._left <= 0:
            self._turn()

    def _turn(self) -> None:
        unknown = [length for length, rate in self.rates.items() if not rate.known]
        best = max(self.rates, key=lambda length: self.rates[length].value)
        if unknown:
            self._begin(unknown[0], TRIAL_STEPS)
        elif not self._resting:
            self._begin(best, REST_STEPS)
        else:
            others = [length for length in self.rates if length != best]
            self._next_trial += 1
            self._begin(others[self._next_trial % len(others)], TRIAL_STEPS)
        self._resting = not unknown and not self._resting

    def _begin(self, length: int, num_steps: int) -> None:
        if length != self.length:
            self._settling = SETTLING_STEPS
        self.length, self._left = length, num_steps


class DraftLength:
    """The length for the next step, at most `longest`."""

    def __init__(self, longest: int) -> None:
        self._lengths = [longest]
        while self._lengths[-1] > 0:
            self._lengths.append((self._lengths[-1] - 1) // 2)
        self._sizes: dict[int, _BatchSize] = {}

    def choose(self, num_requests: int) -> int:
        return self._size(num_requests).length

    def measure(self, num_requests: int, longest_draft: int, num_tokens: int, seconds: float) -> None:
        """A step of nothing but decodes: how many requests, the longest draft in it, tokens it gave, its time."""
        length = min(length for length in self._lengths if length >= min(longest_draft, self._lengths[0]))
        self._size(num_requests).measure(length, num_tokens, seconds)

    def rates(self) -> dict[int, dict[int, float]]:
        """Tokens per second by size of the batch (its lower bound) and draft length, where they are known."""
        return {
            1 << size - 1: {length: rate.value for length, rate in entry.rates.items() if rate.known}
            for size, entry in sorted(self._sizes.items())
        }

    def _size(self, num_requests: int) -> _BatchSize:
        size = max(1, num_requests).bit_length()
        if size not in self._sizes:
            self._sizes[size] = _BatchSize(self._lengths)
        return self._sizes[size]
