"""Rolling updates of flags under load, with fake cores: the frontend's side of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from preload.engine.errors import RequestError
from preload.engine.frontend.canary import CanaryToken, compare, tolerance
from preload.engine.frontend.config import FrontendConfig
from preload.engine.frontend.errors import StartError
from preload.engine.frontend.update import Update, updated_config

NUM_STREAMS = 32
SLOW = {"step_s": 0.01}


def rollout(frontend: Any, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "preload.cli.main", "rollout", "demo", *words]
    command += ["--runtime-dir", str(frontend.runtime_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def steps_of(finished: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The last report of each step."""
    assert finished.returncode == 0, finished.stderr
    return {step["step"]: step for step in json.loads(finished.stdout)["steps"]}


def serving(frontend: Any) -> list[dict[str, Any]]:
    return [core for core in frontend.cores() if core["state"] == "serving"]


def stream(frontend: Any, prompt: str, max_tokens: int) -> str:
    """The text of a stream that must not fail in any way."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    pieces = []
    with httpx.stream("POST", f"{frontend.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                pieces.append(event["choices"][0]["text"])
    return "".join(pieces)


@contextmanager
def load(frontend: Any, num_streams: int = NUM_STREAMS, max_tokens: int = 30) -> Iterator[list[int]]:
    """Streams one after the other on each of `num_streams` connections; every text must be the undisturbed one.

    Gives a list that grows by one with each stream that has ended."""
    over = threading.Event()
    ended: list[int] = []
    prompts = [f"stream number {i} says something of its own" for i in range(num_streams)]
    expected = [stream(frontend, prompt, max_tokens) for prompt in prompts[:1]]

    def run(index: int) -> None:
        texts = set()
        while not over.is_set():
            texts.add(stream(frontend, prompts[index], max_tokens))
            ended.append(index)
        assert len(texts) == 1
        assert index or texts == set(expected)

    with ThreadPoolExecutor(num_streams) as pool:
        running = [pool.submit(run, index) for index in range(num_streams)]
        try:
            yield ended
        finally:
            over.set()
        for future in running:
            future.result()


def test_a_restart_with_other_flags_under_32_streams_loses_nothing(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend(SLOW, standby=1)
    (before,) = serving(frontend)
    with load(frontend) as ended:
        wait_for(lambda: len(ended) >= NUM_STREAMS, "every stream to have run")
        steps = steps_of(rollout(frontend, "--restart", "--set", "max_model_len=4096", "--json"))
        count = len(ended)
        wait_for(lambda: len(ended) >= count + NUM_STREAMS, "every stream to have run again")
        (after,) = serving(frontend)
    assert list(steps) == ["start", "canary", "memory", "switch", "drain", "done"]
    assert steps["canary"]["message"] == "8 tokens equal to the running core's"
    assert set(steps["memory"]) >= {"peak_bytes", "weights_bytes", "new_kv_cache_bytes"}
    assert after["pid"] == steps["switch"]["pid"] != before["pid"]
    (old,) = [core for core in frontend.cores() if core["pid"] == before["pid"]]
    assert (old["state"], old["exit_code"]) == ("dead", 0)
    assert frontend.metric('preload_frontend_requests_total{endpoint="/v1/completions",status="500"}') == 0


def test_sighup_restarts_the_core_and_streams_move_to_the_new_one_after_the_drain_time(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend(SLOW, drain_timeout_s=0.5)
    (before,) = serving(frontend)
    undisturbed = stream(frontend, "one two three four five", 400)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, frontend, "one two three four five", 400)
        wait_for(lambda: frontend.metric("preload_frontend_in_flight") == 1, "the stream to run")
        frontend.process.send_signal(signal.SIGHUP)
        assert running.result() == undisturbed
    assert "sequences move to the new core" in frontend.log
    assert "the update is complete" in frontend.log
    assert [core["pid"] for core in serving(frontend)] != [before["pid"]]


@pytest.mark.parametrize(
    ("behaviour", "words", "reason"),
    [
        ("other_tokens_if_max_model_len", (), "the canary's answer differs at token 0"),
        ("exit_if_max_model_len", (), "this configuration cannot be served"),
        ("never_ready_if_max_model_len", ("--set", "core_ready_timeout_s=1"), "not ready after 1 s"),
    ],
)
def test_an_update_that_goes_wrong_is_rolled_back_under_32_streams(
    start_frontend: Callable[..., Any], behaviour: str, words: tuple[str, ...], reason: str
) -> None:
    frontend = start_frontend({**SLOW, behaviour: 77})
    (before,) = serving(frontend)
    with load(frontend):
        finished = rollout(frontend, "--restart", "--set", "max_model_len=77", *words)
    assert finished.returncode == 25
    assert "rolled back" in finished.stderr
    assert reason in finished.stderr
    assert [core["pid"] for core in serving(frontend)] == [before["pid"]]
    assert {core["state"] for core in frontend.cores()[1:]} == {"dead"}
    assert steps_of(rollout(frontend, "--restart", "--set", "max_model_len=78", "--json"))["done"]


def test_a_stream_that_has_moved_moves_again_at_the_next_update(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend(SLOW)
    text, moves, goal = "", [], 10.0
    body = {"prompt": "a b c ", "max_tokens": 8000, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{frontend.url}/v1/completions", json=body, timeout=30) as answer:
        for num_chunks, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            if num_chunks > goal:
                if len(moves) == 3:
                    break
                steps = steps_of(rollout(frontend, "--restart", "--drain-s", "0.1", "--json"))
                moves.append(steps["drain"]["message"])
                goal = frontend.metric("preload_frontend_output_tokens_total") + 10
    assert moves == ["1 sequences move to the new core"] * 3
    assert text == ("a b c " * len(text))[: len(text)]
    assert len(serving(frontend)) == 1


def test_with_evict_first_requests_wait_for_the_only_core_there_is(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend(SLOW)
    with load(frontend, num_streams=8) as ended:
        wait_for(lambda: len(ended) >= 8, "every stream to have run")
        steps = steps_of(rollout(frontend, "--restart", "--evict-first", "--json"))
        count = len(ended)
        wait_for(lambda: len(ended) >= count + 8, "every stream to have run again")
    assert list(steps) == ["hold", "start", "canary", "switch", "done"]
    old, new = frontend.cores()
    assert old["died_at_ns"] <= new["spawned_at_ns"]


def test_with_evict_first_and_the_same_weights_a_stream_pauses_after_the_drain_time_and_goes_on(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend({**SLOW, "exit_if_max_model_len": 77})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, frontend, "a b c", 1500)
        wait_for(lambda: frontend.metric("preload_frontend_in_flight") == 1, "the stream to run")
        words = ("--restart", "--evict-first", "--drain-s", "0.1", "--json")
        steps = steps_of(rollout(frontend, *words))
        assert steps["hold"]["message"] == "1 more wait, and go on with the new core"
        failed = rollout(frontend, *words, "--set", "max_model_len=77")
        assert "the old core serves again" in failed.stderr
        assert not running.done()
        assert running.result() == "a b c" * 500
    assert len(serving(frontend)) == 1


def test_with_evict_first_requests_wait_only_as_long_and_as_many_as_they_may(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    limits = {"request_timeout_s": 5.0, "max_queued_requests": 2, "drain_timeout_s": 0.2}
    frontend = start_frontend({"never_ready_if_max_model_len": 77}, **limits)
    with ThreadPoolExecutor(4) as pool:
        update = pool.submit(rollout, frontend, "--restart", "--evict-first", "--set", "max_model_len=77")
        wait_for(lambda: len(frontend.cores()) == 2, "the only core to be replaced")
        asked = [pool.submit(frontend.complete, prompt="a", max_tokens=1) for _ in range(3)]
        answers = sorted((answer.result().status_code, answer.result().json()["error"]["code"]) for answer in asked)
        assert answers == [(503, "overloaded"), (504, "request_timeout"), (504, "request_timeout")]
        late = pool.submit(frontend.complete, prompt="a", max_tokens=1)
        wait_for(lambda: frontend.metric("preload_frontend_queued") == 1, "the request to wait")
        frontend.process.send_signal(signal.SIGTERM)
        assert late.result().json()["error"]["code"] == "shutting_down"
        assert update.result().returncode != 0


def test_with_evict_first_the_old_core_comes_back_when_the_new_one_fails(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend({**SLOW, "exit_if_max_model_len": 77})
    with load(frontend, num_streams=8):
        finished = rollout(frontend, "--restart", "--evict-first", "--set", "max_model_len=77")
    assert finished.returncode == 25
    assert "the old core serves again" in finished.stderr
    assert stream(frontend, "a b c", 3)


def test_a_core_that_dies_while_it_is_drained_is_replaced_for_its_requests(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend(SLOW)
    (before,) = serving(frontend)
    undisturbed = stream(frontend, "one two three four five", 300)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, frontend, "one two three four five", 300)
        wait_for(lambda: frontend.metric("preload_frontend_in_flight") == 1, "the stream to run")
        update = pool.submit(rollout, frontend, "--restart", "--drain-s", "60", "--json")
        wait_for(lambda: len(serving(frontend)) == 2, "two cores")
        os.kill(before["pid"], signal.SIGKILL)
        assert running.result() == undisturbed
        steps_of(update.result())
    assert len(frontend.cores()) == 3
    assert len(serving(frontend)) == 1


def test_two_updates_at_once_are_one_too_many(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    frontend = start_frontend(SLOW)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, frontend, "one two three", 300)
        wait_for(lambda: frontend.metric("preload_frontend_in_flight") == 1, "the stream to run")
        first = pool.submit(rollout, frontend, "--restart", "--drain-s", "60", "--json")
        wait_for(lambda: len(frontend.cores()) == 2, "the first update to begin")
        second = rollout(frontend, "--restart")
        assert (second.returncode, "under way" in second.stderr) == (2, True)
        running.result()
        steps_of(first.result())


def test_a_service_that_is_not_there_is_answered_with_those_that_are(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend()
    command = [sys.executable, "-m", "preload.cli.main", "rollout", "nobody", "--restart"]
    command += ["--runtime-dir", str(frontend.runtime_dir)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    assert f"{frontend.url} (demo, pid {frontend.process.pid})" in finished.stderr


def test_what_an_update_may_not_change_or_cannot_parse_is_named_and_changes_nothing() -> None:
    config = FrontendConfig(checkpoint="/models/a.gguf", generation="0123", max_num_seqs=4)

    def after(to: str = "", **changes: str) -> FrontendConfig:
        return updated_config(config, Update(to=to, changes=changes))

    changed = after(max_num_seqs="8", template="false", step_timeout_s="2.5")
    assert (changed.max_num_seqs, changed.template, changed.step_timeout_s) == (8, False, 2.5)
    assert (changed.generation, changed.model_name) == ("0123", "a")
    moved = after(to="/models/b.gguf")
    assert (moved.checkpoint, moved.generation, moved.model_name) == ("/models/b.gguf", "", "a")
    assert after(quantization="bf16").generation == ""
    for changes in ({"port": "1"}, {"max_num_seqs": "many"}, {"template": "1"}, {"max_num_seqs": "0"}):
        with pytest.raises(RequestError, match=next(iter(changes))):
            after(**changes)


def test_the_canary_allows_rounding_and_ties_and_nothing_else() -> None:
    answer = [CanaryToken(5, -0.5), CanaryToken(6, -1.0), CanaryToken(7, -2.0)]
    compare(answer, [CanaryToken(5, -0.501), CanaryToken(6, -1.0), CanaryToken(7, -2.0)], 0.01)
    compare(answer, [CanaryToken(5, -0.5), CanaryToken(9, -1.001), CanaryToken(1, -9.0)], 0.01)
    for other in (
        [CanaryToken(5, -0.52), *answer[1:]],
        [CanaryToken(4, -0.7), *answer[1:]],
        answer[:2],
    ):
        with pytest.raises(StartError, match="the canary's answer"):
            compare(answer, other, 0.01)


def test_the_operators_socket_is_the_owners_alone_and_survives_nonsense(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend()
    (path,) = Path(frontend.runtime_dir).glob("frontend-*/admin.sock")
    assert path.stat().st_mode & 0o777 == 0o600
    for sent in (
        b"\n",
        b"[]\n",
        b"{}\n",
        b'{"do": "update", "set": 3}\n',
        b"\xff\xfe\n",
        b"x" * 100_000,
        b"[" * 60_000,
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(path))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = json.loads(connection.makefile("rb").readline())
        assert (answer["step"], answer["kind"]) == ("failed", "RequestError")
    assert frontend.complete(prompt="a", max_tokens=1).status_code == 200


def test_the_canary_allows_as_much_as_the_coarser_of_two_cores_rounds() -> None:
    exact = FrontendConfig(checkpoint="demo")
    assert tolerance(exact, replace(exact, kv_cache_dtype="float32")) == 0.01
    for changes in ({"matmul_precision": "medium"}, {"kv_cache_dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}):
        assert tolerance(exact, replace(exact, **changes)) == tolerance(replace(exact, **changes), exact) == 0.25
