"""N-gram drafts against a search through the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preload.engine.core.request import Request, SamplingParams
from preload.engine.core.speculation.drafter import Task
from preload.engine.core.speculation.ngram import MIN_MATCH, NgramDrafter, NgramIndex


def longest_match(tokens: list[int]) -> int:
    """Length of the longest suffix that occurs earlier too, 0 if it is shorter than MIN_MATCH."""
    for length in range(len(tokens) - 1, MIN_MATCH - 1, -1):
        suffix = tokens[-length:]
        if any(tokens[end - length : end] == suffix for end in range(length, len(tokens))):
            return length
    return 0


def match_length(tokens: list[int], follows: int) -> int:
    """How long a suffix ends before the predicted position, too."""
    length = 0
    while length < follows and tokens[follows - 1 - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 7), max_size=60))
def test_the_draft_follows_the_longest_earlier_match(tokens: list[int], pieces: list[int]) -> None:
    index, given_tokens = NgramIndex(), []
    while tokens:
        count = pieces.pop() if pieces else len(tokens)
        index.extend(tokens[:count])
        given_tokens += tokens[:count]
        tokens = tokens[count:]
        expected, follows = longest_match(given_tokens), index._follows
        assert (follows >= 0) == (expected > 0)
        if follows >= 0:
            assert match_length(given_tokens, follows) == expected
            assert index.predict(2)[0] == given_tokens[follows]


def test_a_repetition_is_continued_beyond_the_end() -> None:
    index = NgramIndex()
    index.extend([9, 8, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])
    assert index.predict(9) == [4, 1, 2, 3, 4, 1, 2, 3, 4]
    assert index.predict(0) == []


def test_of_equal_matches_the_latest_is_followed() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3])
    assert index.predict(2) == [60, 1]


def test_nothing_is_drafted_without_a_match() -> None:
    index = NgramIndex()
    assert index.predict(4) == []
    index.extend(range(100))
    assert index.predict(4) == []


def test_endless_repetition_costs_a_bounded_search() -> None:
    index = NgramIndex()
    index.extend([7] * 20_000)
    index.extend([5, 7, 7, 7])
    assert index.predict(3) == [5, 7, 7]


@pytest.fixture
def request_of() -> Any:
    def make(tokens: list[int], output: list[int]) -> Request:
        return Request(
            request_id="r", prompt_ids=tokens, output_ids=output, sampling=SamplingParams(max_tokens=99), row=0
        )

    return make


def test_a_drafter_follows_its_requests_and_forgets_them(request_of: Any) -> None:
    drafter, request = NgramDrafter(), request_of([1, 2, 3, 4, 5, 1, 2], [])

    def propose() -> list[int]:
        (draft,) = drafter.propose([Task(request, 2)], None)  # type: ignore[arg-type]
        return draft.token_ids

    assert propose() == []
    request.output_ids.append(3)
    assert propose() == [4, 5]
    request.output_ids += [4, 5]
    assert propose() == [1, 2]
    drafter.forget(request)
    drafter.forget(request)
    request = request_of([7, 7, 8], [9])
    assert propose() == []
