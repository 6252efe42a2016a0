"""The real model in forms, called through the official client, and with its core killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "Describe a person as JSON."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PROCESSOR = '''
import torch

class Favourite:
    """Makes one token of each row the only one."""

    def __init__(self, max_num_seqs, vocab_size):
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64)

    def validate_params(self, params):
        if not isinstance(params, int):
            raise ValueError("params is a token id")

    def add_request(self, row, params):
        if params is not None:
            self.tokens[row] = params
        return params is not None

    def apply_staged_writes(self):
        pass

    def apply(self, logits, ctx):
        return torch.full_like(logits, -1e9).scatter_(1, self.tokens[ctx.expanded_idx_mapping][:, None], 0.0)
'''


@pytest.fixture(scope="module")
def served(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("processors")
    (folder / "house_processors.py").write_text(PROCESSOR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        return serve("--logits-processors", "house_processors:Favourite")


@pytest.fixture(scope="module")
def client(served: Any) -> openai.OpenAI:
    return served.client()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return str(client.models.list().data[0].id)


def check_person(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    assert list(value) == ["name", "age", "colour", "tags"]
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 120
    assert value["colour"] in ("red", "green", "blue")
    assert len(value["tags"]) <= 2
    assert all(isinstance(tag, str) and len(tag) <= 6 for tag in value["tags"])
    return value


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_have_the_schema_asked_for(client: openai.OpenAI, model: str, temperature: float) -> None:
    def ask(seed: int) -> str:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, response_format=FORM, temperature=temperature, seed=seed, max_tokens=200
        )
        assert answer.choices[0].finish_reason == "stop"
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(ask, range(4)))
    for text in texts:
        check_person(text)
    assert len(set(texts)) == (1 if temperature == 0 else 4)
    assert ask(2) == texts[2]


def test_an_answer_stays_in_its_form_when_its_core_is_killed(served: Any, client: openai.OpenAI, model: str) -> None:
    asked: Any = {
        "model": model, "messages": MESSAGES, "response_format": FORM, "temperature": 1.0, "seed": 5,
        "max_tokens": 200,
    }  # fmt: skip
    undisturbed = client.chat.completions.create(**asked).choices[0].message.content
    victim = served.core_pid()
    pieces: list[str] = []
    for event in client.chat.completions.create(**asked, stream=True):
        pieces.append(event.choices[0].delta.content or "")
        if len(pieces) == 8:
            os.kill(victim, signal.SIGKILL)
    assert "".join(pieces) == undisturbed
    check_person("".join(pieces))
    assert served.cores()[-1]["pid"] != victim


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"choice": ["yes, surely", "no", "maybe"]}, {"yes, surely", "no", "maybe"}),
        ({"regex": "(19|20)[0-9]{2}"}, {str(year) for year in range(1900, 2100)}),
        ({"grammar": 'root ::= "a" | "b" | "c"'}, {"a", "b", "c"}),
    ],
)
def test_completions_have_the_form_asked_for(
    client: openai.OpenAI, model: str, form: dict[str, Any], allowed: set[str]
) -> None:
    for seed in range(3):
        answer = client.completions.create(
            model=model, prompt="Answer:", temperature=1.0, seed=seed, extra_body={"structured_outputs": form}
        )
        assert answer.choices[0].text in allowed
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_are_called_streamed_and_not(client: openai.OpenAI, model: str, choice: Any) -> None:
    asked: Any = {
        "model": model, "messages": [{"role": "user", "content": "How is the weather in Paris?"}], "tools": [WEATHER],
        "tool_choice": choice, "temperature": 1.0, "seed": 3, "max_tokens": 200, "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert not whole.message.content
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert 1 <= arguments["days"] <= 9
    streamed = {"name": "", "arguments": ""}
    for event in client.chat.completions.create(**asked, stream=True):
        for delta in event.choices[0].delta.tool_calls or []:
            streamed["name"] += delta.function.name or ""
            streamed["arguments"] += delta.function.arguments or ""
    assert streamed == {"name": "get_weather", "arguments": call.function.arguments}


def test_bad_words_are_never_said(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    assert "Paris" in client.completions.create(**asked).choices[0].text
    assert "Paris" not in client.completions.create(**asked, extra_body={"bad_words": ["Paris"]}).choices[0].text


def test_a_custom_processor_is_loaded_by_its_flag(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "a", "max_tokens": 3, "temperature": 0}
    answer = client.completions.create(**asked, extra_body={"logits_processors": {"Favourite": 504}})
    assert answer.choices[0].text == "TheTheThe"
    with pytest.raises(openai.BadRequestError, match="params is a token id"):
        client.completions.create(**asked, extra_body={"logits_processors": {"Favourite": "x"}})
    with pytest.raises(openai.BadRequestError, match="no logits processor 'Other' here"):
        client.completions.create(**asked, extra_body={"logits_processors": {"Other": 1}})


def test_the_prompt_s_logprobs_are_those_of_writing_it(client: openai.OpenAI, model: str) -> None:
    """What the model says by itself has the same log-probabilities when it is read as a prompt."""
    asked: Any = {"model": model, "temperature": 0, "logprobs": 2}
    said = client.completions.create(**asked, prompt="The capital of France is", max_tokens=12).choices[0]
    prompt = "The capital of France is" + said.text
    read = client.completions.create(**asked, prompt=prompt, max_tokens=1, echo=True).choices[0].logprobs
    count = len(said.logprobs.tokens)
    assert read.tokens[-count - 1 : -1] == said.logprobs.tokens
    assert read.token_logprobs[-count - 1 : -1] == pytest.approx(said.logprobs.token_logprobs, abs=0.05)
    assert read.token_logprobs[0] is None
