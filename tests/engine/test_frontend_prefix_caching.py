"""What the API says of prefix caching and priorities, over the fake core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SALT = "tenant"
"""The fake core claims to have found as many tokens as this has characters."""


def test_cached_tokens_are_part_of_the_usage_and_counted(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend()
    answer = frontend.complete(prompt="a b c d e", max_tokens=3, n=2, cache_salt=SALT).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(SALT)}  # each prompt counts once
    assert frontend.metric("preload_frontend_cached_prompt_tokens_total") == 2 * len(SALT)
    plain = frontend.complete(prompt="a b c d e", max_tokens=3).json()
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1}, "priority"),  # this server minds none
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(frontend: Any, body: dict[str, Any], param: str) -> None:
    answer = frontend.complete(prompt="a", max_tokens=1, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_priorities_are_taken_by_a_server_that_minds_them(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend(scheduling_policy="priority")
    assert frontend.complete(prompt="a", max_tokens=1, priority=-3).status_code == 200
