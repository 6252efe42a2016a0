"""What is sent and how answers are counted: a wrong count must never become a figure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from preload.bench.peers.load_generator import Answer, LoadGenerator, Request
from preload.bench.peers.picture import picture
from preload.bench.peers.prompts import PROSE, Prompts
from preload.bench.peers.report import medians, ratios, text
from preload.bench.peers.servers import LlamaCpp, Preload, Vllm
from preload.bench.processes import BenchError
from preload.engine.frontend.tokenizer_files import load_tokenizer


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> Prompts:
    return Prompts(str(demo_model))


@pytest.mark.parametrize("num_tokens", [16, 128, 2000])
def test_a_prompt_has_exactly_as_many_tokens_as_asked_for(
    prompts: Prompts, num_tokens: int, demo_model: Path
) -> None:
    encode = load_tokenizer(str(demo_model)).encode
    for seed in ("a", "b", "c"):
        assert len(encode(prompts.text(num_tokens, seed), add_special=True)) == num_tokens


def test_prompts_of_different_seeds_differ_within_the_first_block(prompts: Prompts, demo_model: Path) -> None:
    encode = load_tokenizer(str(demo_model)).encode
    beginnings = {tuple(encode(prompts.text(128, str(seed)), add_special=True)[:16]) for seed in range(100)}
    assert len(beginnings) == 100
    assert prompts.text(128, "1") == prompts.text(128, "1")


def test_a_continued_prompt_keeps_its_beginning(prompts: Prompts) -> None:
    prefix = prompts.text(200, "prefix")
    one, other = (prompts.text(232, seed, after=prefix) for seed in ("one", "other"))
    assert one.startswith(prefix)
    assert other.startswith(prefix)
    assert one != other
    assert prompts.count(one) == 232


def test_the_shipped_prose_has_more_than_4096_tokens(prompts: Prompts) -> None:
    assert prompts.count(PROSE.read_text()) > 4096


class FakeServer(BaseHTTPRequestHandler):
    """Streams as many words as asked for; counts one token too few where the prompt says so."""

    protocol_version = "HTTP/1.0"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self._send({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        if asked["prompt"] == "fail":
            return self._send({"error": {"message": "no more"}})
        num_tokens = asked["max_tokens"] - (asked["prompt"] == "too few")
        self._send({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": num_tokens}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def base_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(base_url: str, prompt: str, count: int = 1) -> list[Answer]:
    async def work() -> list[Answer]:
        async with LoadGenerator(base_url, "model", 30) as generator:
            return await generator.ask_all([Request(prompt, 2, 5)] * count, 2)

    return asyncio.run(work())


def test_every_request_is_answered_and_every_piece_has_its_time(base_url: str) -> None:
    answers = ask(base_url, "fine", count=5)
    assert [answer.num_output_tokens for answer in answers] == [5] * 5
    assert [len(answer.piece_times) for answer in answers] == [5] * 5
    assert all(answer.sent_s < answer.piece_times[0] for answer in answers)
    assert answers[0].text == " word" * 5


@pytest.mark.parametrize(("prompt", "said"), [("too few", r"\(2, 4\).*\(2, 5\)"), ("fail", "no more")])
def test_an_answer_that_is_not_what_was_asked_for_is_a_failure(base_url: str, prompt: str, said: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        ask(base_url, prompt)
    with pytest.raises(BenchError, match=said):
        raise caught.value.exceptions[0]


def result_of(*rounds: dict[str, Any]) -> dict[str, Any]:
    entries = [{"figures": figures} for figures in rounds]
    found = medians(entries)
    return {
        "machine": {"cpu": "a <fast> one", "cores": 2},
        "limits": {"num_threads": 2, "memory_bytes_per_s": 2e10, "weights_bytes_per_s": 4e10, "flops_per_s": 1e11},
        "model": {"checkpoint": "m.gguf", "weight_bytes": 10**8, "multiplications_per_token": 10**8},
        "rounds": entries,
        "medians": found,
        "ratios": ratios(found),
    }


def at_8(tokens_per_s: float, between_ms: float = 10.0) -> dict[str, Any]:
    return {"concurrency_8": {"output_tokens_per_s": tokens_per_s, "between_p50_ms": between_ms}}


def test_ratios_are_of_medians_and_against_the_better_setting_of_a_peer() -> None:
    rounds = [
        {"preload": at_8(ours), "llama.cpp": at_8(50), "vllm-float32": at_8(40), "vllm-bfloat16": at_8(80)}
        for ours in (90, 100, 400)
    ]
    result = result_of(*rounds)
    key = "concurrency_8.output_tokens_per_s"
    assert result["ratios"]["llama.cpp"][key] == 2.0
    assert result["ratios"]["vllm"][key] == 1.25


def test_where_less_is_better_the_ratio_is_turned_around() -> None:
    figures = {"preload": {"start": {"first_token_s": 0.5}}, "llama.cpp": {"start": {"first_token_s": 2.0}}}
    assert result_of(figures)["ratios"]["llama.cpp"]["start.first_token_s"] == 4.0


def test_a_workload_that_failed_once_has_no_figure_and_its_reason_is_told() -> None:
    failed = {"concurrency_8": {"failed": "it ended with 1"}}
    result = result_of({"preload": at_8(100), "llama.cpp": at_8(50)}, {"preload": at_8(100), "llama.cpp": failed})
    assert result["medians"]["llama.cpp"]["concurrency_8"] == {"failed": "it ended with 1"}
    assert "llama.cpp" not in result["ratios"]
    assert "failed: llama.cpp, concurrency_8: it ended with 1" in text(result)


def test_the_picture_is_well_formed_and_has_a_bar_for_every_figure() -> None:
    root = ElementTree.fromstring(picture(result_of({"preload": at_8(100), "llama.cpp": at_8(50)})))
    bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("rx")]
    assert [float(bar.get("width", 0)) for bar in bars] == [120.0, 60.0]


def test_the_report_says_what_bounds_a_step() -> None:
    report = text(result_of({"preload": at_8(400, between_ms=20.0)}))
    assert "8 at a time: 12.5 MB of weights a token; a step takes 20.0 ms, reading them 2.5 ms (12%)" in report


def test_what_was_run_is_told_without_the_folders_of_this_machine(tmp_path: Path) -> None:
    checkpoint, log = str(tmp_path / "model.gguf"), tmp_path / "log"
    targets = [
        Preload(checkpoint),
        LlamaCpp(checkpoint, tmp_path / "llama-server", log, 2),
        Vllm(tmp_path / "folder", tmp_path / "venv", log, "bfloat16"),
    ]
    for target in targets:
        told = target.settings()["serve"]
        assert str(tmp_path) not in told
        assert "model.gguf" in told or "--model folder" in told


def test_another_setting_of_ours_has_ratios_of_its_own() -> None:
    rate = {"concurrency_64": {"output_tokens_per_s": 100.0}}
    found = {"preload": rate, "preload-medium": {"concurrency_64": {"output_tokens_per_s": 300.0}}, "vllm-x": rate}
    key = "concurrency_64.output_tokens_per_s"
    assert {label: part[key] for label, part in ratios(found).items()} == {"vllm": 1.0, "vllm, preload-medium": 3.0}
