"""Cores die; requests do not. Real processes, SIGKILL in the middle of streams."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

COMPLETION = "/v1/completions"
SLOW = {"step_s": 0.01}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def streamed_text(frontend: Any, at_token: Callable[[int], None], **body: Any) -> tuple[str, list[Any]]:
    """The whole text of a stream and the errors in it; `at_token` is told how many chunks have come."""
    pieces: list[str] = []
    errors: list[Any] = []
    with httpx.stream("POST", frontend.url + COMPLETION, json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                errors.append(event["error"])
                continue
            pieces.append(event["choices"][0]["text"])
            at_token(len(pieces))
    return "".join(pieces), errors


def test_a_stream_goes_on_with_the_next_core_and_ends_with_the_text_of_an_undisturbed_run(
    start_frontend: Callable[..., Any],
) -> None:
    frontend = start_frontend(SLOW)
    body = {"prompt": "one two three four five six seven", "max_tokens": 60, "seed": 11, "temperature": 1}
    undisturbed, _ = streamed_text(frontend, lambda _: None, **body)
    killed: list[int] = []

    def kill_at_20(num_chunks: int) -> None:
        if num_chunks == 20:
            killed.append(frontend.kill_core())

    text, errors = streamed_text(frontend, kill_at_20, **body)
    assert killed
    assert (text, errors) == (undisturbed, [])
    first, second = frontend.cores()
    assert (first["pid"], first["exit_code"], first["state"]) == (killed[0], -signal.SIGKILL, "dead")
    assert "SIGKILL" in first["exit_reason"]
    assert first["spawned_at_ns"] < first["ready_at_ns"] < first["first_token_at_ns"] < first["died_at_ns"]
    assert first["died_at_ns"] <= second["spawned_at_ns"] < second["ready_at_ns"] < second["first_token_at_ns"]
    assert [phase["name"] for phase in second["phases"]] == ["exec", "ready"]
    assert frontend.metric("preload_frontend_core_restarts_total") == 1
    assert frontend.metric("preload_frontend_resubmissions_total") == 1


def test_all_streams_of_a_dead_core_complete(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend(SLOW)
    prompts = [f"stream number {i} says something of its own" for i in range(8)]

    def run(prompt: str) -> tuple[str, list[Any]]:
        def kill_once(num_chunks: int) -> None:
            if prompt is prompts[0] and num_chunks == 10:
                frontend.kill_core()

        return streamed_text(frontend, kill_once, prompt=prompt, max_tokens=25, temperature=0)

    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(run, prompts))
    assert len(frontend.cores()) == 2
    for prompt, (text, errors) in zip(prompts, results, strict=True):
        assert errors == []
        assert text == frontend.complete(prompt=prompt, max_tokens=25, temperature=0).json()["choices"][0]["text"]


def test_a_request_that_kills_two_cores_is_answered_with_an_error_and_others_are_served(
    start_frontend: Callable[..., Any],
) -> None:
    # Slow steps, so that the tokens before the third are out when the core dies: a stream that has begun.
    frontend = start_frontend({"poison_id": 4649, "step_s": 0.1})
    response = frontend.complete(prompt="The capital of France", max_tokens=20)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "core_died_repeatedly"
    text, errors = streamed_text(frontend, lambda _: None, prompt=" France now", max_tokens=20)
    assert [error["code"] for error in errors] == ["core_died_repeatedly"]
    assert text
    assert frontend.complete(prompt="The capital", max_tokens=20).status_code == 200


def test_a_core_that_is_told_to_end_is_replaced_and_neither_old_requests_nor_new_ones_fail(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend({**SLOW, "drain_on_term": True})
    (core,) = frontend.cores()
    answers: list[httpx.Response] = []

    def end_core(num_chunks: int) -> None:
        if num_chunks == 10:
            os.kill(core["pid"], signal.SIGTERM)
        elif num_chunks == 20:
            answers.append(frontend.complete(prompt="x y z", max_tokens=3, temperature=0))

    text, errors = streamed_text(frontend, end_core, prompt="a b c", max_tokens=300, temperature=0)
    assert (text, errors) == ("a b c" * 100, [])
    assert [(answer.status_code, answer.json()["choices"][0]["text"]) for answer in answers] == [(200, "x y z")]
    old, _ = frontend.cores()
    assert (old["pid"], old["state"]) == (core["pid"], "dead")
    assert "told to end" in old["exit_reason"]


def test_requests_that_arrive_while_no_core_is_ready_wait_for_one(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend()
    pid = frontend.kill_core()
    assert frontend.complete(prompt="a b c", max_tokens=3).status_code == 200
    assert frontend.cores()[-1]["pid"] != pid


def test_a_core_that_cannot_start_is_told_by_ready_with_its_last_words(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    exit_file = tmp_path / "exit"
    exit_file.write_text("the checkpoint is broken at tensor x")
    frontend = start_frontend({"exit_file": str(exit_file)}, wait_ready=False)
    wait_for(lambda: len(frontend.cores()) > 2, "the core to be started again")
    ready = frontend.get("/ready")
    assert ready.status_code == 503
    assert any("exited with code 3: the checkpoint is broken" in text for text in ready.json()["reasons"])
    assert "the checkpoint is broken at tensor x" in ready.json()["last_core_output"]
    assert frontend.get("/health").status_code == 200
    refused = frontend.complete(prompt="a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "core_unavailable")
    assert refused.headers["retry-after"]
    exit_file.unlink()
    wait_for(lambda: frontend.get("/ready").status_code == 200, "the core to recover")
    assert frontend.complete(prompt="a").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish_then_ends_the_core_and_exits_0(
    start_frontend: Callable[..., Any], number: signal.Signals
) -> None:
    frontend = start_frontend(SLOW)
    core = frontend.cores()[-1]["pid"]

    def stop_at_5(num_chunks: int) -> None:
        if num_chunks == 5:
            frontend.process.send_signal(number)

    text, errors = streamed_text(frontend, stop_at_5, prompt="a b c", max_tokens=50, temperature=0)
    assert errors == []
    assert text.startswith("a b c" * 10)
    assert frontend.process.wait(30) == 0
    assert not alive(core)
    assert list(frontend.runtime_dir.iterdir()) == []
    with pytest.raises(httpx.ConnectError):
        frontend.get("/health")


def test_a_drain_that_takes_too_long_answers_what_is_left_with_an_error(
    start_frontend: Callable[..., Any], tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    frontend = start_frontend({"step_s": 0.01, "hold_file": str(hold)}, drain_timeout_s=0.3)

    def stop_at_5(num_chunks: int) -> None:
        if num_chunks == 5:
            hold.touch()
            frontend.process.send_signal(signal.SIGTERM)

    _, errors = streamed_text(frontend, stop_at_5, prompt="a b c", max_tokens=5000, temperature=0)
    assert [error["code"] for error in errors] == ["shutting_down"]
    assert frontend.process.wait(30) == 0


def test_a_core_that_ignores_the_drain_is_killed(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend({"ignore_term": True})
    core = frontend.cores()[-1]["pid"]
    assert frontend.stop() == 0
    assert not alive(core)


def test_no_core_outlives_a_killed_frontend_and_the_next_one_cleans_up(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend()
    core = frontend.cores()[-1]["pid"]
    os.kill(frontend.process.pid, signal.SIGKILL)
    frontend.process.wait()
    wait_for(lambda: not alive(core), "the core to die with its frontend")
    assert len(list(frontend.runtime_dir.iterdir())) == 1
    frontend.start()
    assert [path.name.split("-")[1] for path in frontend.runtime_dir.iterdir()] == [str(frontend.process.pid)]


def test_the_folder_of_core_sockets_is_private(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend()
    (folder,) = frontend.runtime_dir.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
