"""Who is blamed for the death of cores, and who is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from preload.engine.frontend.metrics import Metrics
from preload.engine.frontend.requests import CLEARED_AFTER, InFlight, Sample
from preload.engine.frontend.sampling import SamplingParams
from preload.protos import engine_core_pb2 as pb


class Core:
    """A session that knows which requests it has, and dies of the guilty ones at its first step."""

    def __init__(self, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self.has: list[str] = []
        in_flight.attach(self)

    def send(self, request: pb.CoreRequest) -> None:
        if request.HasField("add"):
            self.has.append(request.add.request_id)
        elif request.abort.request_id in self.has:
            self.has.remove(request.abort.request_id)

    def die(self) -> None:
        self.in_flight.detach(self)

    def step(self, num_tokens: int = 1) -> None:
        for request_id in list(self.has):
            self.in_flight.on_output(pb.RequestOutput(request_id=request_id, token_ids=[1] * num_tokens))


def make_samples(in_flight: InFlight, *names: str) -> dict[str, Sample]:
    samples = {}
    for name in names:
        sampling = SamplingParams(max_tokens=1000)
        samples[name] = Sample(request_id=name, index=0, prompt_ids=(1,), sampling=sampling, events=asyncio.Queue())
        in_flight.submit(samples[name])
    return samples


def error_of(sample: Sample) -> str | None:
    while not sample.events.empty():
        event = sample.events.get_nowait()
        if event.error is not None:
            return event.error.code
    return None


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@in_a_loop
async def test_a_request_alone_with_two_cores_that_died_is_blamed() -> None:
    in_flight = InFlight(Metrics())
    sample = make_samples(in_flight, "a")["a"]
    Core(in_flight).die()
    assert error_of(sample) is None
    Core(in_flight).die()
    assert error_of(sample) == "core_died_repeatedly"
    assert len(in_flight) == 0


@pytest.mark.parametrize("guilty", range(8))
@in_a_loop
async def test_the_guilty_one_of_eight_is_found_by_halving_and_the_others_are_cleared(guilty: int) -> None:
    in_flight = InFlight(Metrics())
    samples = make_samples(in_flight, *"abcdefgh")
    culprit = "abcdefgh"[guilty]
    num_deaths = 0
    for _ in range(20):
        core = Core(in_flight)
        while culprit not in core.has and culprit in {s.request_id for s in samples.values() if s.home}:
            core.step(CLEARED_AFTER)  # a trial of innocents; the next one follows in the same core
        if samples[culprit].home is None:
            break
        core.die()
        num_deaths += 1
    assert {name for name, sample in samples.items() if error_of(sample)} == {culprit}
    assert num_deaths <= 2 + 3
    assert sorted(core.has) == sorted(set(samples) - {culprit})


@in_a_loop
async def test_progress_between_two_deaths_clears() -> None:
    in_flight = InFlight(Metrics())
    sample = make_samples(in_flight, "a")["a"]
    for _ in range(10):
        core = Core(in_flight)
        core.step(CLEARED_AFTER)
        core.die()
    assert error_of(sample) is None
    core = Core(in_flight)
    core.step(CLEARED_AFTER - 1)
    core.die()
    assert error_of(sample) == "core_died_repeatedly"


@in_a_loop
async def test_new_requests_wait_while_suspects_are_tried_and_run_afterwards() -> None:
    in_flight = InFlight(Metrics())
    make_samples(in_flight, "a", "b")
    Core(in_flight).die()
    Core(in_flight).die()
    core = Core(in_flight)
    assert core.has == ["a"]
    make_samples(in_flight, "new")
    assert core.has == ["a"]
    core.step(CLEARED_AFTER)
    assert core.has == ["a", "b"]
    in_flight.abort("b")  # its client has gone: the trial is over as well
    assert core.has == ["a", "new"]


@in_a_loop
async def test_a_request_that_came_with_the_second_core_is_not_suspected() -> None:
    in_flight = InFlight(Metrics())
    old = make_samples(in_flight, "old")["old"]
    Core(in_flight).die()
    core = Core(in_flight)
    new = make_samples(in_flight, "new")["new"]
    core.die()
    core = Core(in_flight)
    assert core.has == ["old"]
    core.die()
    assert (error_of(old), error_of(new)) == ("core_died_repeatedly", None)


@in_a_loop
async def test_samples_move_with_their_tokens_and_the_old_core_is_told() -> None:
    old, new = InFlight(Metrics()), InFlight(Metrics())
    core = Core(old)
    sample = make_samples(old, "a")["a"]
    core.step(3)
    other = Core(new)
    assert old.move_to(new) == 1
    assert (core.has, other.has, sample.output_ids) == ([], ["a"], [1, 1, 1])
    core.has = ["a"]
    core.step()  # what the old core still says is passed over
    assert len(sample.output_ids) == 3
    sample.abort()
    assert (len(old), len(new), other.has) == (0, 0, [])
