"""The frontend's smaller parts by themselves: seeds, backoff, admission, choices, options."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from preload.engine.errors import RequestError
from preload.engine.frontend.admission import Admission
from preload.engine.frontend.backoff import Backoff
from preload.engine.frontend.choices import Choice
from preload.engine.frontend.config import FrontendConfig
from preload.engine.frontend.core_process import CoreLife, CoreProcess
from preload.engine.frontend.errors import BadRequestError, OverloadedError, StartError
from preload.engine.frontend.metrics import Metrics
from preload.engine.frontend.requests import InFlight, Sample, SampleEvent
from preload.engine.frontend.sampling import SamplingParams, derive_seed
from preload.engine.frontend.tokenizer_files import load_tokenizer
from preload.protos import engine_core_pb2 as pb

SECOND_NS = 1_000_000_000


def test_seeds_of_parallel_samples_are_distinct_and_fit_64_bits() -> None:
    for seed in (0, 1, (1 << 64) - 1):
        seeds = [derive_seed(seed, index) for index in range(128)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 128
        assert all(0 <= value < 1 << 64 for value in seeds)


def life(ready_after_s: float | None, lived_s: float) -> CoreLife:
    ready_at_ns = None if ready_after_s is None else int(ready_after_s * SECOND_NS)
    return CoreLife(serial=0, pid=1, spawned_at_ns=0, ready_at_ns=ready_at_ns, died_at_ns=int(lived_s * SECOND_NS))


def test_a_core_that_dies_before_it_is_ready_is_replaced_at_once_and_then_ever_more_slowly() -> None:
    backoff = Backoff()
    delays = [backoff.after(life(None, 0.1)) for _ in range(10)]
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_core_that_served_for_a_while_starts_the_count_anew() -> None:
    backoff = Backoff()
    assert [backoff.after(life(1, 2)) for _ in range(5)] == [0, 0, 0, 0.5, 1]
    assert backoff.after(life(1, 60)) == 0
    assert backoff.after(life(1, 2)) == 0


def test_a_core_that_has_given_tokens_is_replaced_at_once() -> None:
    backoff = Backoff()
    for _ in range(10):
        died = life(1, 1.5)
        died.first_token_at_ns = int(1.2 * SECOND_NS)
        assert backoff.after(died) == 0


def test_places_are_given_in_order_and_a_large_request_is_not_overtaken() -> None:
    async def scenario() -> list[str]:
        admission = Admission(3, 10, Metrics())
        order: list[str] = []

        async def take(name: str, count: int) -> None:
            await admission.acquire(count)
            order.append(name)

        await take("first", 2)
        tasks = [asyncio.create_task(take(name, count)) for name, count in (("large", 3), ("small", 1))]
        await asyncio.sleep(0)
        assert order == ["first"]
        admission.release(2)
        await asyncio.wait_for(tasks[0], 5)
        admission.release(3)
        await asyncio.wait_for(tasks[1], 5)
        return order

    assert asyncio.run(scenario()) == ["first", "large", "small"]


def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    async def scenario() -> None:
        admission = Admission(2, 10, Metrics())
        await admission.acquire(1)
        large = asyncio.create_task(admission.acquire(2))
        small = asyncio.create_task(admission.acquire(1))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait_for(small, 5)
        # A place that was given in the same moment as the cancellation is not lost either.
        admission.release(1)
        admission.release(1)
        await admission.acquire(2)
        last = asyncio.create_task(admission.acquire(2))
        await asyncio.sleep(0)
        admission.release(2)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        await asyncio.wait_for(admission.acquire(2), 5)

    asyncio.run(scenario())


def test_what_can_never_be_admitted_is_refused_at_once() -> None:
    async def scenario() -> None:
        admission = Admission(2, 1, Metrics())
        with pytest.raises(BadRequestError):
            await admission.acquire(3)
        await admission.acquire(2)
        with pytest.raises(OverloadedError):
            await admission.acquire(2)

    asyncio.run(scenario())


class RecordingSession:
    def __init__(self) -> None:
        self.sent: list[pb.CoreRequest] = []

    def send(self, request: pb.CoreRequest) -> None:
        self.sent.append(request)


def test_a_sample_goes_to_the_next_core_with_the_tokens_it_has() -> None:
    async def scenario() -> None:
        in_flight = InFlight(Metrics())
        sampling = SamplingParams(max_tokens=9, seed=5)
        sample = Sample(request_id="r", index=0, prompt_ids=(1, 2), sampling=sampling, events=asyncio.Queue())
        in_flight.submit(sample)
        first, second = RecordingSession(), RecordingSession()
        in_flight.attach(first)
        in_flight.on_output(pb.RequestOutput(request_id="r", token_ids=[7, 8]))
        in_flight.detach(first)
        in_flight.attach(second)
        (add,) = [request.add for request in second.sent]
        assert (list(add.prompt_ids), list(add.output_ids), add.sampling.seed) == ([1, 2], [7, 8], 5)
        in_flight.detach(first)  # a stale session changes nothing
        in_flight.abort("r")
        assert [request.WhichOneof("request") for request in second.sent] == ["add", "abort"]
        in_flight.abort("r")
        assert len(second.sent) == 2

    asyncio.run(scenario())


def test_a_request_the_core_refuses_fails_with_the_core_s_words() -> None:
    async def scenario() -> SampleEvent:
        in_flight = InFlight(Metrics())
        events: asyncio.Queue[SampleEvent] = asyncio.Queue()
        sampling = SamplingParams(max_tokens=9)
        in_flight.submit(Sample(request_id="r", index=0, prompt_ids=(1,), sampling=sampling, events=events))
        in_flight.on_output(
            pb.RequestOutput(request_id="r", finish_reason=pb.FINISH_REASON_ERROR, error="no room for it")
        )
        assert len(in_flight) == 0
        return events.get_nowait()

    error = asyncio.run(scenario()).error
    assert error is not None
    assert "no room for it" in error.message


def test_a_choice_counts_the_stop_token_and_shows_no_text_of_it(demo_model: Path) -> None:
    choice = Choice(0, load_tokenizer(str(demo_model)), (), 0)
    logprobs = [pb.TokenLogprobs(logprob=-1.0)] * 2
    delta = choice.add(SampleEvent(0, [504, 3575], logprobs, "stop"))
    assert (delta.text, delta.finish_reason, choice.num_tokens) == ("The", "stop", 2)
    assert [entry.token_id for entry in delta.entries] == [504]


def test_logprobs_wait_for_the_text_of_their_token(demo_model: Path) -> None:
    choice = Choice(0, load_tokenizer(str(demo_model)), (" capital city",), 0)
    logprobs = [pb.TokenLogprobs(logprob=-1.0)]
    held = choice.add(SampleEvent(0, [3575], logprobs))
    assert (held.text, list(held.entries)) == ("", [])
    released = choice.add(SampleEvent(0, [282], logprobs))
    assert released.text == " capital of"
    assert [(entry.start, entry.end) for entry in released.entries] == [(0, 8), (8, 11)]


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_seqs": 0},
        {"port": 70000},
        {"request_timeout_s": -1},
        {"quantization": "int3"},
        {"config_overrides": "[]"},
        {"drain_timeout_s": float("nan")},
    ],
    ids=str,
)
def test_impossible_options_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        FrontendConfig(checkpoint="x", **change)


def test_the_model_is_named_after_its_file_or_folder() -> None:
    assert FrontendConfig(checkpoint="/models/Some.Q4_1.gguf").model_name == "Some.Q4_1"
    assert FrontendConfig(checkpoint="/models/Llama-3.2-1B/").model_name == "Llama-3.2-1B"
    assert FrontendConfig(checkpoint="/models/x.gguf", served_model_name="y").model_name == "y"


def test_a_socket_path_that_is_too_long_is_refused_naming_the_option() -> None:
    with pytest.raises(StartError, match="--runtime-dir"):
        CoreProcess(0, "/" + "x" * 100)
