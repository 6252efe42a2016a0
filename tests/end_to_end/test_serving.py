"""The real model through the whole path, asked by the official client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2-greedy.json").read_text())["cases"]
NUM_STREAMS = 64


@pytest.fixture(scope="module")
def served(serve: Callable[..., Any]) -> Any:
    return serve("--quantization", "f32", "--max-num-seqs", "64")


@pytest.fixture(scope="module")
def model(served: Any) -> str:
    return str(served.client().models.list().data[0].id)


@pytest.mark.parametrize("quantization", ["keep", "f32"])
def test_greedy_completions_equal_the_reference(
    serve: Callable[..., Any], served: Any, model: str, quantization: str
) -> None:
    client = (served if quantization == "f32" else serve("--quantization", quantization)).client()
    prompts: Any = [case["prompt_ids"] for case in CASES]
    extra = {"ignore_eos": True}
    answer = client.completions.create(
        model=model, prompt=prompts, max_tokens=32, temperature=0, logprobs=0, extra_body=extra
    )
    assert len(answer.choices) == len(CASES)
    for choice, case in zip(answer.choices, CASES, strict=True):
        visible = case["text"].replace("<|im_end|>", "").replace("<|im_start|>", "")
        assert choice.text == visible
        assert len(choice.logprobs.tokens) == 32
        assert max(choice.logprobs.token_logprobs) <= 0


def test_chat_streams_what_it_answers_whole(served: Any, model: str) -> None:
    client = served.client()
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=24, logprobs=True, top_logprobs=3
    )
    (choice,) = whole.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    for entry in choice.logprobs.content:
        assert entry.token == entry.top_logprobs[0].token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    usage: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options=usage,
    )
    events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == choice.message.content
    assert spent(events[-1].usage) == spent(whole.usage)


def spent(usage: Any) -> tuple[int, int]:
    """Tokens of prompt and answer; how many of them had been computed before is chance."""
    return usage.prompt_tokens, usage.completion_tokens


def test_stop_string_ends_the_answer_before_it(served: Any, model: str) -> None:
    answer = served.client().completions.create(
        model=model, prompt="The capital of France is", max_tokens=16, temperature=0, stop=["\n\n"]
    )
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_seeded_sampling_repeats_and_seeds_differ(served: Any, model: str) -> None:
    def ask(seed: int) -> str:
        answer = served.client().completions.create(
            model=model, prompt="Once upon a time", max_tokens=12, temperature=1.0, seed=seed
        )
        return str(answer.choices[0].text)

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in (1, 2, 3)}) > 1


def test_64_concurrent_streams_have_the_texts_they_have_alone(served: Any, model: str) -> None:
    client = served.client()
    prompts = [f"Here are {number} facts about the number {number}:" for number in range(NUM_STREAMS)]

    def stream(prompt: str) -> str:
        events = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0, stream=True)
        return "".join(event.choices[0].text for event in events)

    alone = [stream(prompt) for prompt in prompts]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(stream, prompts))
    assert together == alone


def test_core_killed_in_mid_stream_is_replaced_and_the_stream_completes(served: Any, model: str) -> None:
    client = served.client()
    request: dict[str, Any] = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    undisturbed = client.completions.create(**request).choices[0].text
    victim = served.core_pid()
    pieces = []
    for event in client.completions.create(**request, stream=True):
        pieces.append(event.choices[0].text)
        if len(pieces) == 3:
            os.kill(victim, signal.SIGKILL)
    assert "".join(pieces) == undisturbed
    lives = served.cores()
    assert lives[-2]["exit_code"] == -signal.SIGKILL
    assert lives[-1]["pid"] != victim
    names = [phase["name"] for phase in lives[-1]["phases"]]
    assert names[:7] == ["exec", "imports", "attach", "build", "kv_cache", "warm_up", "ready"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-model-len", "100000000"), "more than the model's 8192 positions"),
        (("--kv-cache-bytes", "10"), "cannot hold one sequence"),
    ],
)
def test_a_configuration_that_no_core_can_have_ends_the_server(
    options: tuple[str, ...], said: str, shared_daemon: Any, demo_model: Path
) -> None:
    words = ("serve", str(demo_model), "--port", "0", "--runtime-dir", str(shared_daemon.runtime_dir), *options)
    command = [sys.executable, "-P", "-m", "preload.cli.main", *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 25
    assert said in answer.stderr.splitlines()[-1]
