"""N-gram drafts: what followed the last tokens when they occurred before, in the prompt or in the output.

Of all earlier occurrences of the sequence's end the longest match is taken, of equals the latest; what came after it
is the draft. A match that goes on is followed without a look-up; for a new one the index is asked: a table from the
last MIN_MATCH tokens to where they occurred. A token costs about a microsecond, and nothing is computed for
requests that are not speculated. No weights, no KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from preload.engine.core.request import Request
from preload.engine.core.scheduler import Schedule

from .drafter import Computed, Draft, Task

MIN_MATCH = 3
"""Shorter matches are chance: what follows them is mostly rejected."""

MAX_CANDIDATES = 32
"""Occurrences that are compared, the latest first: a bound of the cost of text that repeats itself endlessly."""

MAX_MATCH = 64
"""Matches are compared this far back; longer ones count as equal."""

_ID_BITS = 32
_KEY_MASK = (1 << _ID_BITS * MIN_MATCH) - 1


class NgramIndex:
    """The tokens of one request, and where each MIN_MATCH of them in a row occurred."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._key = 0  # the last MIN_MATCH tokens as one number
        self._last_end: dict[int, int] = {}
        self._earlier_end: list[int] = []  # by end of an occurrence: the end of the one before, or −1
        self._follows = -1
        """Index of the token that the current match predicts; −1: there is no match."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes more tokens, and finds the longest earlier match of the new end."""
        followed = self._follows
        for token in tokens:
            followed = followed + 1 if 0 <= followed < len(self.tokens) and self.tokens[followed] == token else -1
            self._append(token)
        self._follows = followed if followed >= 0 else self._find()

    def predict(self, count: int) -> list[int]:
        """What followed the match, `count` tokens. Where that runs into the end, it is continued periodically."""
        if self._follows < 0:
            return []
        start, period = self._follows, len(self.tokens) - self._follows
        if period >= count:
            return self.tokens[start : start + count]
        return [self.tokens[start + i % period] for i in range(count)]

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self._key = key = (self._key << _ID_BITS | token) & _KEY_MASK
        end = len(self.tokens)
        if end < MIN_MATCH:
            self._earlier_end.append(-1)
            return
        self._earlier_end.append(self._last_end.get(key, -1))
        self._last_end[key] = end

    def _find(self) -> int:
        """The index after the longest earlier match of the end, or −1."""
        end = len(self.tokens)
        candidate = self._earlier_end[end - 1] if end else -1
        best, best_length = -1, 0
        for _ in range(MAX_CANDIDATES):
            if candidate < 0 or best_length >= MAX_MATCH:
                break
            length = self._match_length(candidate)
            if length > best_length:
                best, best_length = candidate, length
            candidate = self._earlier_end[candidate - 1]
        return best

    def _match_length(self, candidate: int) -> int:
        """How many tokens before `candidate` equal those before the end."""
        tokens, length, end = self.tokens, MIN_MATCH, len(self.tokens)
        limit = min(candidate, MAX_MATCH)
        while length < limit and tokens[candidate - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class NgramDrafter:
    """An index per speculated request."""

    keeps_up = False
    never_rests = False
    num_lookahead_tokens = 0
    bytes_per_block = 0
    graphs = None

    def __init__(self) -> None:
        self._indices: dict[str, NgramIndex] = {}

    def observe(self, plan: Schedule) -> None:
        """Rows and blocks mean nothing here, and a preempted request keeps its tokens."""

    def propose(self, tasks: Sequence[Task], computed: Computed) -> list[Draft]:
        return [Draft(self._propose(task)) for task in tasks]

    def _propose(self, task: Task) -> list[int]:
        request = task.request
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = NgramIndex()
            index.extend(request.token_ids())
        elif num_new := request.num_tokens - len(index.tokens):
            index.extend(request.output_ids[-num_new:])
        return index.predict(task.num_wanted)

    def forget(self, request: Request) -> None:
        self._indices.pop(request.request_id, None)

    def allocate_kv(self, num_blocks: int) -> None:
        """There is none."""

    def use_graphs(self, token_budget: int) -> None:
        """Nothing is computed."""

    def warm_up(self) -> None:
        """There is nothing to touch."""

    def describe(self) -> str:
        return f"n-gram drafts, matches of {MIN_MATCH} tokens or more"
