"""The official client against the real frontend: what it parses is what the fake core sampled."""

from __future__ import annotations

from typing import Any

import openai
import pytest

PROMPT = "The capital of France is"
TOKENS = ["The", " capital", " of", " France", " is"]
MESSAGES: Any = [{"role": "system", "content": "Be brief, please"}, {"role": "user", "content": "hi"}]
# The fake core repeats its prompt, and the template begins with <|im_start|>system.
ANSWER = "system\nBe brief, please"


@pytest.fixture
def client(frontend: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=frontend.url + "/v1", api_key="unused", max_retries=0)


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "preload"
    with pytest.raises(openai.NotFoundError, match="another"):
        client.models.retrieve("another")


def test_a_completion_has_text_usage_and_the_reason_it_ended(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=7, temperature=0)
    assert answer.choices[0].text == PROMPT + "The capital"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 7, 12)


def test_a_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=7, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == PROMPT + "The capital"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert chunks[-1].choices == []


def test_completion_logprobs_have_openai_s_shape(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == TOKENS
    assert logprobs.text_offset == [0, 3, 11, 14, 21]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"The": -0.5, "<|endoftext|>": -1.5}


def test_prompts_as_strings_and_as_ids_are_choices_in_order(client: openai.OpenAI) -> None:
    strings = client.completions.create(
        model="demo", prompt=["one two", "red blue"], n=2, max_tokens=2, temperature=0
    )
    assert [choice.index for choice in strings.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in strings.choices] == ["one two", "one two", "red blue", "red blue"]
    ids = client.completions.create(model="demo", prompt=[504, 3575], max_tokens=2, temperature=0)
    assert ids.choices[0].text == "The capital"
    lists = client.completions.create(model="demo", prompt=[[504], [3575]], max_tokens=1, temperature=0)
    assert [choice.text for choice in lists.choices] == ["The", " capital"]


def test_echo_puts_the_prompt_before_the_text_streamed_and_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "echo": True}
    assert client.completions.create(**asked).choices[0].text == PROMPT + "The"
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + "The"


def test_a_chat_answer_follows_the_template_and_ends_at_the_end_of_turn(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_chat_answer_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_logprobs_add_up_to_the_text_streamed_and_not(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "demo", "messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert "".join(item.token for item in whole.content) == "<|im_start|>" + ANSWER
    assert bytes(b for item in whole.content for b in item.bytes or []).decode() == "<|im_start|>" + ANSWER
    assert [len(item.top_logprobs) for item in whole.content] == [2] * len(whole.content)
    streamed = [
        item
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == whole.content


def test_content_parts_of_text_are_one_text(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "Be brief, "}, {"type": "text", "text": "please"}]
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "system", "content": parts}], temperature=0
    )
    assert answer.choices[0].message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_is_never_shown(client: openai.OpenAI, stream: bool) -> None:
    asked: Any = {
        "model": "demo", "prompt": PROMPT, "max_tokens": 50, "temperature": 0,
        "stop": ["nothing", "tal of Fr"], "logprobs": 0,
    }  # fmt: skip
    if stream:
        chunks = list(client.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
        tokens = [t for chunk in chunks if chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.tokens]
    else:
        choice = client.completions.create(**asked).choices[0]
        text, reason, tokens = choice.text, choice.finish_reason, choice.logprobs.tokens
    assert (text, reason) == ("The capi", "stop")
    assert tokens == ["The", " capital"]


def test_text_held_back_for_a_stop_string_that_never_comes_is_shown(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=5, temperature=0, stop=[" is not"])
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].finish_reason == "length"


def test_a_stop_id_ends_the_text_before_it(client: openai.OpenAI) -> None:
    extra = {"stop_token_ids": [4649]}
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=50, temperature=0, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("The capital of", "stop")


def test_min_tokens_keeps_stop_strings_and_stop_ids_from_ending_early(client: openai.OpenAI) -> None:
    extra = {"min_tokens": 6, "stop_token_ids": [504]}
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=50, temperature=0, stop=["capital"], extra_body=extra
    )
    assert answer.choices[0].text == PROMPT + "The "


def test_ignore_eos_goes_on_to_the_limit(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=40, extra_body=extra
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40


def test_parallel_samples_differ_and_a_seed_makes_them_again(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(
            model="demo", prompt=" a b c d e f g h i j k l m", n=4, seed=7, max_tokens=3, temperature=1
        )
        return [choice.text for choice in answer.choices]

    first = sample()
    assert len(set(first)) > 1
    assert sample() == first
