"""What restricts an answer, from the HTTP interface to what a core is sent, with a core that invents its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from preload.engine.core.structured import FormKind
from preload.engine.frontend.bad_words import bad_word_ids
from preload.engine.frontend.constraints import parse_constraints
from preload.engine.frontend.fields import Fields
from preload.engine.frontend.tokenizer_files import load_tokenizer
from preload.engine.frontend.vocabulary import spelled

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, FormKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"structured_outputs": {"json_object": True}}, FormKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"structured_outputs": {"json": {"type": "null"}}}, FormKind.JSON_SCHEMA, '{"type": "null"}'),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, FormKind.JSON_SCHEMA, '{"type": "null"}'),
        ({"structured_outputs": {"regex": "a+"}}, FormKind.REGEX, "a+"),
        ({"structured_outputs": {"grammar": "start: x"}}, FormKind.GRAMMAR, "start: x"),
        ({"structured_outputs": {"choice": ['a"b', "ä\n"]}}, FormKind.GRAMMAR, 'start: "a\\"b" | "ä\\n"\n'),
    ],
)
def test_forms_are_read_from_either_field(asked: dict[str, Any], kind: FormKind, text: str) -> None:
    form = parse_constraints(Fields(asked), 10).form
    assert form is not None
    assert (form.output.kind, form.output.text) == (kind, text)


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": None, "bad_words": [], "logits_processors": {}},
    ],
)
def test_what_asks_for_nothing_restricts_nothing(asked: dict[str, Any]) -> None:
    assert parse_constraints(Fields(asked), 10) == parse_constraints(Fields({}), 10)


def test_bad_words_are_barred_at_the_start_and_after_a_blank(demo_model: Path) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    sequences = bad_word_ids(tokenizer, ["Paris", "Paris", "unbelievably odd"])
    texts = [tokenizer.decode(sequence) for sequence in sequences]
    assert texts[:2] == ["Paris", " Paris"]
    assert "unbelievably odd" in texts
    assert len(set(sequences)) == len(sequences)


def test_a_vocabulary_spells_every_text(demo_model: Path) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    message = spelled(tokenizer)
    text = 'Käse, 北京 and\n\t{"x": 1}'
    assert b"".join(message.tokens[i] for i in tokenizer.encode(text, add_special=False)).decode() == text
    assert len(message.tokens) == tokenizer.vocab_size
    assert set(message.eos_ids) <= set(message.special_ids)


def test_a_form_is_sent_after_the_vocabulary_also_to_the_next_core(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend()
    body = {"prompt": "a b c", "max_tokens": 3, "temperature": 0, "structured_outputs": {"regex": "x"}}
    first = frontend.complete(**body)
    assert first.status_code == 200, first.text
    frontend.kill_core()
    assert frontend.complete(**body).json()["choices"] == first.json()["choices"]


def test_a_known_processor_is_served(frontend: Any) -> None:
    answer = frontend.complete(prompt="a", max_tokens=1, logits_processors={"known": {"x": [1, None]}})
    assert answer.status_code == 200, answer.text


def client(frontend: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0)


def test_echo_with_logprobs_shows_the_prompt_s_too_streamed_and_not(frontend: Any) -> None:
    asked: Any = {"model": "demo", "prompt": "The capital of", "max_tokens": 2, "temperature": 0, "echo": True}
    asked["logprobs"] = 2
    choice = client(frontend).completions.create(**asked).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.tokens[:3] == ["The", " capital", " of"]
    assert logprobs.token_logprobs[:3] == [None, -1, -2]
    assert logprobs.token_logprobs[3:] == [-0.5, -0.5]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1][" capital"] == -1
    starts = [sum(map(len, logprobs.tokens[:i])) for i in range(5)]
    assert logprobs.text_offset == starts
    events = [event.choices[0] for event in client(frontend).completions.create(**asked, stream=True)]
    assert "".join(event.text for event in events) == choice.text
    assert [t for event in events for t in event.logprobs.tokens] == logprobs.tokens
    assert [t for event in events for t in event.logprobs.text_offset] == starts


def test_prompt_logprobs_have_vllm_s_shape_at_both_endpoints(frontend: Any) -> None:
    choice = frontend.complete(prompt="The capital of", max_tokens=2, prompt_logprobs=1).json()["choices"][0]
    none, second, _third = choice["prompt_logprobs"]
    assert none is None
    assert second == {
        "7": {"logprob": -0.5, "rank": 1, "decoded_token": second["7"]["decoded_token"]},
        "3575": {"logprob": -1.0, "rank": 2, "decoded_token": " capital"},
    }
    assert choice["logprobs"] is None
    answer = frontend.post(CHAT, json={"messages": USER, "max_tokens": 2, "prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


def test_prompt_logprobs_survive_the_core(start_frontend: Callable[..., Any], tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    frontend = start_frontend({"hold_file": str(hold)})
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(frontend.complete, prompt="The capital of", max_tokens=2, prompt_logprobs=1)
        frontend.wait_for(lambda: frontend.metric("preload_frontend_in_flight") >= 1, "the request to arrive")
        frontend.kill_core()
        hold.unlink()
        assert len(answer.result().json()["choices"][0]["prompt_logprobs"]) == 3


def test_messages_of_tools_reach_the_template(start_frontend: Callable[..., Any], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ tools[0].function.name }}|{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}|{% endfor %}"
    )
    frontend = start_frontend(chat_template=str(template))
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    answer = frontend.post(
        CHAT,
        json={
            "messages": [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "done"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "none",
            "max_tokens": 40,
            "temperature": 0,
        },
    )
    # The fake core repeats the prompt.
    assert answer.json()["choices"][0]["message"]["content"].startswith("f|user:hi|assistant:[f 5]|tool:done|")
