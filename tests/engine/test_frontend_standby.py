"""Standbys, hangs and requests that kill: real processes, signalled in the middle of streams."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

SLOW = {"step_s": 0.01}
POISON, HANG = 4649, 4649  # " France"


def stream(frontend: Any, at_token: Callable[[int], None] = lambda _: None, **body: Any) -> tuple[str, list[str]]:
    """The whole text of a stream and the codes of errors in it; `at_token` is told how many chunks have come."""
    pieces: list[str] = []
    errors: list[str] = []
    url = f"{frontend.url}/v1/completions"
    with httpx.stream("POST", url, json={"temperature": 0, **body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    errors.append(event["error"]["code"])
                else:
                    pieces.append(event["choices"][0]["text"])
                    at_token(len(pieces))
    return "".join(pieces), errors


def in_state(frontend: Any, state: str) -> list[dict[str, Any]]:
    return [core for core in frontend.cores() if core["state"] == state]


@pytest.fixture
def start_with_standby(start_frontend: Callable[..., Any], wait_for: Callable[..., Any]) -> Callable[..., Any]:
    def start(behaviour: dict[str, Any] | None = None, **config: Any) -> Any:
        frontend = start_frontend(behaviour or SLOW, standby=1, **config)
        wait_for(lambda: in_state(frontend, "standby"), "a warm standby")
        return frontend

    return start


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11}])
def test_a_standby_takes_over_the_stream_of_a_killed_core_and_is_replaced(
    start_with_standby: Callable[..., Any], wait_for: Callable[..., Any], sampling: dict[str, Any]
) -> None:
    frontend = start_with_standby()
    body = {"prompt": "one two three four five six seven", "max_tokens": 60, **sampling}
    undisturbed, _ = stream(frontend, **body)
    (first,), (standby,) = in_state(frontend, "serving"), in_state(frontend, "standby")

    def kill_at_20(num_chunks: int) -> None:
        if num_chunks == 20:
            os.kill(first["pid"], signal.SIGKILL)

    assert stream(frontend, kill_at_20, **body) == (undisturbed, [])
    (second,) = in_state(frontend, "serving")
    assert second["pid"] == standby["pid"]
    assert second["spawned_at_ns"] < second["warm_at_ns"] < second["ready_at_ns"] < second["first_token_at_ns"]
    (next_standby,) = wait_for(lambda: in_state(frontend, "standby"), "the next standby")
    assert next_standby["pid"] not in (first["pid"], second["pid"])
    assert frontend.metric("preload_frontend_core_restarts_total") == 1


def test_a_standby_serves_nothing_and_its_death_disturbs_nobody(
    start_with_standby: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_with_standby()
    body = {"prompt": "one two three", "max_tokens": 60}
    undisturbed, _ = stream(frontend, **body)
    (serving,), (standby,) = in_state(frontend, "serving"), in_state(frontend, "standby")

    def kill_at_20(num_chunks: int) -> None:
        if num_chunks == 20:
            os.kill(standby["pid"], signal.SIGKILL)

    assert stream(frontend, kill_at_20, **body) == (undisturbed, [])
    (next_standby,) = wait_for(lambda: in_state(frontend, "standby"), "the next standby")
    assert next_standby["pid"] != standby["pid"]
    assert [core["pid"] for core in in_state(frontend, "serving")] == [serving["pid"]]
    assert frontend.metric("preload_frontend_core_restarts_total") == 0


def test_a_dead_standby_is_passed_over(start_with_standby: Callable[..., Any], wait_for: Callable[..., Any]) -> None:
    frontend = start_with_standby(step_timeout_s=60)
    (standby,) = in_state(frontend, "standby")
    (serving,) = in_state(frontend, "serving")
    os.kill(standby["pid"], signal.SIGKILL)
    os.kill(serving["pid"], signal.SIGKILL)
    assert stream(frontend, prompt="one two three", max_tokens=5)[1] == []
    assert in_state(frontend, "serving")[0]["pid"] not in (standby["pid"], serving["pid"])


@pytest.mark.parametrize("standby", [0, 1])
def test_a_core_that_answers_nothing_is_killed_and_replaced(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], standby: int
) -> None:
    frontend = start_frontend(SLOW, standby=standby, step_timeout_s=2)
    wait_for(lambda: len(in_state(frontend, "standby")) == standby, "the standby")
    body = {"prompt": "one two three four", "max_tokens": 40}
    undisturbed, _ = stream(frontend, **body)
    (victim,) = in_state(frontend, "serving")

    def stop_at_10(num_chunks: int) -> None:
        if num_chunks == 10:
            os.kill(victim["pid"], signal.SIGSTOP)

    assert stream(frontend, stop_at_10, **body) == (undisturbed, [])
    wait_for(lambda: in_state(frontend, "dead"), "the record of its death")
    (dead,) = in_state(frontend, "dead")
    assert dead["pid"] == victim["pid"]
    assert "did not answer for 2 s" in dead["exit_reason"]


def test_a_core_that_answers_nothing_is_replaced_also_when_it_has_nothing_to_do(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend(step_timeout_s=1)
    (victim,) = in_state(frontend, "serving")
    os.kill(victim["pid"], signal.SIGSTOP)
    wait_for(lambda: frontend.get("/ready").status_code == 200 and in_state(frontend, "dead"), "another core")


def test_a_request_whose_steps_hang_twice_is_answered_with_an_error_and_its_neighbour_is_served(
    start_frontend: Callable[..., Any],
) -> None:
    frontend = start_frontend({"step_s": 0.01, "hang_id": HANG}, step_timeout_s=1)
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(stream, frontend, prompt="one two three", max_tokens=50)
        hanging = pool.submit(stream, frontend, prompt="The capital of France", max_tokens=20)
        assert hanging.result()[1] == ["core_died_repeatedly"]
        text, errors = neighbour.result()
    assert errors == []
    assert (text, errors) == stream(frontend, prompt="one two three", max_tokens=50)
    assert "made no step in 1 s" in frontend.cores()[0]["exit_reason"]


def test_the_neighbours_of_a_request_that_kills_are_served_as_if_it_had_not_been_there(
    start_with_standby: Callable[..., Any],
) -> None:
    frontend = start_with_standby({"step_s": 0.01, "poison_id": POISON})
    prompts = [f"neighbour number {i} says something of its own" for i in range(8)]
    with ThreadPoolExecutor(9) as pool:
        running = [pool.submit(stream, frontend, prompt=prompt, max_tokens=40) for prompt in prompts]
        poison = pool.submit(stream, frontend, prompt="The capital of France", max_tokens=40)
        assert poison.result()[1] == ["core_died_repeatedly"]
        results = [future.result() for future in running]
    for prompt, result in zip(prompts, results, strict=True):
        assert result == stream(frontend, prompt=prompt, max_tokens=40)
    assert len(in_state(frontend, "dead")) <= 6


def test_a_core_is_started_by_generation_when_one_is_given(tmp_path: Path) -> None:
    from preload.engine.frontend.config import FrontendConfig
    from preload.engine.frontend.server import make_core_command

    def core(**config: Any) -> dict[str, Any]:
        command = make_core_command(FrontendConfig(template=False, **config), False)
        told: dict[str, Any] = json.loads(command(str(tmp_path / "s"), 0)[-1])
        return told

    assert core(checkpoint="/models/a.gguf")["checkpoint"] == "/models/a.gguf"
    by_id = core(checkpoint="/models/a.gguf", generation="0123456789abcdef")
    assert (by_id["checkpoint"], by_id["generation_id"]) == ("", "0123456789abcdef")


def read_until_closed(frontend: Any, sent: bytes) -> bytes:
    """What a client gets that sends this and no more, until the server hangs up."""
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=60) as connection:
        connection.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                received += data
    return received


def test_a_client_that_sends_too_slowly_is_cut_off(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend(client_timeout_s=0.5)
    assert read_until_closed(frontend, b"") == b""
    assert read_until_closed(frontend, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n") == b""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    assert b" 408 " in read_until_closed(frontend, head + b'{"prompt": "a').splitlines()[0]
    assert frontend.complete(prompt="a b c", max_tokens=3).status_code == 200


def test_a_client_that_does_not_read_blocks_nobody_and_is_cut_off(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    aborts = tmp_path / "aborts"
    frontend = start_frontend({"step_s": 0.0001, "abort_log": str(aborts)}, client_timeout_s=1)
    body = json.dumps({"prompt": "a b c", "n": 16, "max_tokens": 8000, "stream": True, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", frontend.port))
        silent.sendall(head + body)
        wait_for(lambda: frontend.metric("preload_frontend_in_flight") == 16, "the request to run")
        assert stream(frontend, prompt="d e f", max_tokens=5)[1] == []
        wait_for(lambda: frontend.metric("preload_frontend_in_flight") == 0, "the silent client's request to end")
    wait_for(lambda: len(aborts.read_text().splitlines()) == 16, "the core to know")
    assert frontend.complete(prompt="a b c", max_tokens=3).status_code == 200
