"""Many clients, slow clients, clients that hang up, and too many of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

COMPLETION = "/v1/completions"


def test_64_streams_at_once_have_the_texts_they_have_alone(frontend: Any) -> None:
    prompts = [f"prompt {i} with a text of its own, number {i * 7919}" for i in range(64)]

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(
            model="demo", prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_streams() -> list[str]:
        async with openai.AsyncOpenAI(base_url=frontend.url + "/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    together = asyncio.run(all_streams())
    alone = [
        frontend.complete(prompt=prompt, max_tokens=12, temperature=0).json()["choices"][0]["text"]
        for prompt in prompts
    ]
    assert together == alone


def open_stream(frontend: Any, **body: Any) -> httpx.Response:
    """A streamed completion whose head has arrived; the caller closes it."""
    client = httpx.Client(timeout=60)
    request = client.build_request("POST", frontend.url + COMPLETION, json={**body, "stream": True})
    return client.send(request, stream=True)


def test_a_client_that_hangs_up_aborts_its_request_in_the_core(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    aborts = tmp_path / "aborts"
    frontend = start_frontend({"step_s": 0.01, "abort_log": str(aborts)})
    response = open_stream(frontend, prompt="a b c", max_tokens=5000)
    event = json.loads(next(line for line in response.iter_lines() if line)[6:])
    response.close()
    wait_for(aborts.exists, "the core to be told")
    assert aborts.read_text() == event["id"].removeprefix("cmpl-") + "-0\n"
    assert frontend.metric("preload_frontend_in_flight") == 0
    assert frontend.stop() == 0
    assert "Traceback" not in frontend.log, "clients hang up every day: no fault of the server's"


def test_a_client_that_hangs_up_before_its_whole_answer_aborts_it_too(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    aborts = tmp_path / "aborts"
    frontend = start_frontend({"step_s": 0.01, "abort_log": str(aborts)})
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(frontend.url + COMPLETION, json={"prompt": "a b c", "max_tokens": 5000}, timeout=0.5)
    wait_for(aborts.exists, "the core to be told")
    line = 'preload_frontend_requests_total{endpoint="/v1/completions",status="499"}'
    wait_for(lambda: frontend.metric(line) == 1, "the request to be counted")


def test_a_stop_string_aborts_the_request_in_the_core(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    aborts = tmp_path / "aborts"
    frontend = start_frontend({"step_s": 0.01, "abort_log": str(aborts)})
    answer = frontend.complete(prompt="The capital of France", max_tokens=5000, stop=" of", temperature=0)
    assert answer.json()["choices"][0]["text"] == "The capital"
    wait_for(aborts.exists, "the core to be told")


def test_a_request_over_its_time_is_ended_streamed_and_not(
    start_frontend: Callable[..., Any], tmp_path: Path
) -> None:
    hold, aborts = tmp_path / "hold", tmp_path / "aborts"
    hold.touch()
    behaviour = {"hold_file": str(hold), "abort_log": str(aborts), "step_s": 0.05}
    frontend = start_frontend(behaviour, request_timeout_s=0.3)
    whole = frontend.complete(prompt="a")
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5000, "ignore_eos": True}
    before = frontend.post("/v1/chat/completions", json=body)
    assert (before.status_code, before.json()["error"]["code"]) == (504, "request_timeout")
    hold.unlink()
    streamed = frontend.post("/v1/chat/completions", json=body)
    assert streamed.status_code == 200
    events = [line[6:] for line in streamed.text.split("\n\n") if line]
    assert json.loads(events[-2])["error"]["code"] == "request_timeout"
    assert events[-1] == "[DONE]"
    assert frontend.metric("preload_frontend_in_flight") == 0


def test_beyond_the_queue_requests_are_turned_away_and_the_rest_is_served(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    frontend = start_frontend({"hold_file": str(hold)}, max_concurrent_requests=2, max_queued_requests=3)
    with ThreadPoolExecutor(5) as pool:
        accepted = [pool.submit(frontend.complete, prompt="a b", max_tokens=2) for _ in range(5)]
        wait_for(lambda: frontend.metric("preload_frontend_queued") == 3, "the queue to fill")
        assert frontend.metric("preload_frontend_in_flight") == 2
        refused = frontend.complete(prompt="a b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        streamed = frontend.complete(prompt="a b", stream=True)
        assert streamed.status_code == 503
        too_many = frontend.complete(prompt="a b", n=3)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        hold.unlink()
        assert [future.result().status_code for future in accepted] == [200] * 5
    assert frontend.metric("preload_frontend_queued") == 0


def test_a_client_that_leaves_the_queue_gives_its_place_up(
    start_frontend: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    frontend = start_frontend({"hold_file": str(hold)}, max_concurrent_requests=1, max_queued_requests=1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(frontend.complete, prompt="a b", max_tokens=2)
        wait_for(lambda: frontend.metric("preload_frontend_in_flight") == 1, "the first to run")
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(frontend.url + COMPLETION, json={"prompt": "c"}, timeout=0.5)
        wait_for(lambda: frontend.metric("preload_frontend_queued") == 0, "the place to be given up")
        second = pool.submit(frontend.complete, prompt="a b", max_tokens=2)
        wait_for(lambda: frontend.metric("preload_frontend_queued") == 1, "the second to wait")
        hold.unlink()
        assert (first.result().status_code, second.result().status_code) == (200, 200)


def test_metrics_count_requests_and_tokens(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend()
    frontend.complete(prompt="The capital of France is", max_tokens=7)
    frontend.get("/made/up/path")
    assert frontend.metric("preload_frontend_prompt_tokens_total") == 5
    assert frontend.metric("preload_frontend_output_tokens_total") == 7
    assert frontend.metric("preload_frontend_first_token_seconds_count") == 1
    assert frontend.metric("preload_frontend_inter_token_seconds_count") == 6
    assert frontend.metric("preload_frontend_core_ready") == 1
    line = 'preload_frontend_requests_total{endpoint="%s",status="%s"}'
    assert frontend.metric(line % ("/v1/completions", 200)) == 1
    assert frontend.metric(line % ("other", 404)) == 1


def test_the_frontend_process_imports_neither_torch_nor_numpy(frontend: Any) -> None:
    maps = Path(f"/proc/{frontend.process.pid}/maps").read_text()
    assert "tokenizers" in maps
    assert "numpy" not in maps
    assert "torch" not in maps


def test_the_phases_of_the_frontend_follow_each_other(frontend: Any) -> None:
    phases = frontend.get("/debug/cores").json()["frontend"]["phases"]
    assert [phase["name"] for phase in phases] == [
        "exec", "load", "spawn", "imports", "tokenizer", "listen", "ready",
    ]  # fmt: skip
    assert all(phase["start_ns"] <= phase["end_ns"] for phase in phases)
