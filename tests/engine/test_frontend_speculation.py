"""Outputs of several tokens at a time: clients see what they see of one token at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from preload.engine.errors import RequestError
from preload.engine.frontend.config import FrontendConfig
from preload.engine.frontend.server import make_core_command

PROMPT = "The capital of France is called Paris, they say"

ASKED: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 13},
    "stop string": {"max_tokens": 40, "stop": ["ance is"]},
    "stop string within a token": {"max_tokens": 40, "stop": ["pit", "zzz"]},
    "stop string over outputs": {"max_tokens": 60, "stop": ["say" + PROMPT[:9]]},
    "stop ids": {"max_tokens": 40, "stop_token_ids": [282]},
    "logprobs": {"max_tokens": 17, "logprobs": 2},
    "logprobs to a stop string": {"max_tokens": 40, "logprobs": 1, "stop": [" Paris"]},
    "min tokens": {"max_tokens": 40, "min_tokens": 12, "stop": [" of"]},
    "several": {"max_tokens": 9, "n": 3, "temperature": 1.0, "seed": 3},
}


@pytest.fixture(scope="module")
def several(prepare_frontend: Callable[..., Any]) -> Iterator[Any]:
    """A frontend whose core gives five tokens at a time."""
    frontend = prepare_frontend({"tokens_per_step": 5}).start()
    yield frontend
    frontend.stop()


def streamed(frontend: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Text by choice and usage of a streamed answer."""
    answer = frontend.complete(**body, stream=True, stream_options={"include_usage": True})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    texts: dict[int, str] = {}
    usage = None
    for event in map(json.loads, events):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return {"texts": texts, "usage": usage}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_one_token_at_a_time(frontend: Any, several: Any, name: str) -> None:
    body = {"model": "demo", "prompt": PROMPT, "temperature": 0, **ASKED[name]}
    expected, got = frontend.complete(**body).json(), several.complete(**body).json()
    assert got["choices"] == expected["choices"]
    assert got["usage"] == expected["usage"]
    assert streamed(several, body) == streamed(frontend, body)


def test_metrics_tell_drafts_by_position(several: Any) -> None:
    name = 'preload_frontend_{}_tokens_total{{position="{}"}}'
    names = [name.format(what, position) for what in ("drafted", "accepted") for position in (0, 3)]
    before = [several.metric(name) for name in names]
    tokens_before = several.metric("preload_frontend_output_tokens_total")
    assert several.complete(model="demo", prompt=PROMPT, max_tokens=7, temperature=0).status_code == 200
    # 5 and 2 tokens: of the second draft of 4 only the first guess was kept.
    assert [several.metric(name) - b for name, b in zip(names, before, strict=True)] == [2, 2, 2, 1]
    assert several.metric("preload_frontend_output_tokens_total") - tokens_before == 7


def test_options_reach_the_core() -> None:
    config = FrontendConfig(
        checkpoint="/m", speculate="draft", draft_model="/d", draft_quantization="int4_group32",
        num_draft_tokens=5, verification="block", template=False,
    )  # fmt: skip
    told = json.loads(make_core_command(config, False)("/s", 0)[-1])
    assert {key: told[key] for key in ("speculate", "num_draft_tokens", "verification", "draft_checkpoint")} == {
        "speculate": "draft", "num_draft_tokens": 5, "verification": "block", "draft_checkpoint": "/d",
    }  # fmt: skip
    assert told["draft_quantization"] == "int4_group32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "draft"}, "needs a draft model"),
        ({"draft_model": "/d"}, "of no use with speculate=none"),
        ({"speculate": "magic"}, "'magic'; known are none, ngram, draft, mtp"),
        ({"speculate": "ngram", "num_draft_tokens": 40}, "between 0 and 31"),
        ({"speculate": "ngram", "verification": "none"}, "known are coupled, sampled, block"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        FrontendConfig(checkpoint="/m", **options)
