"""The core's service over a real Unix socket, around a core in this process."""

from __future__ import annotations

import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from preload.engine.core.loop import DrainAsked, RequestArrived, StepLoop
from preload.engine.core.server import CoreServer, CoreService, Identity
from preload.engine.errors import CoreError
from preload.engine.timeline import Timeline, now_ns
from preload.protos import engine_core_pb2 as pb
from preload.protos import engine_core_pb2_grpc as pb_grpc

TIMEOUT_S = 30


class Client:
    """A frontend with one stream; requests are sent one by one."""

    def __init__(self, socket_path: str) -> None:
        self.channel = grpc.insecure_channel(f"unix:{socket_path}")
        self.stub = pb_grpc.EngineCoreStub(self.channel)
        self._requests: queue.SimpleQueue[pb.CoreRequest | None] = queue.SimpleQueue()

    def open(self) -> Any:
        return self.stub.Generate(iter(self._requests.get, None), timeout=TIMEOUT_S)

    def add(self, request_id: str, prompt: list[int], output_ids: tuple[int, ...] = (), **sampling: Any) -> None:
        params = pb.SamplingParams(**{"max_tokens": 8, **sampling})
        message = pb.AddRequest(request_id=request_id, prompt_ids=prompt, output_ids=output_ids, sampling=params)
        self._requests.put(pb.CoreRequest(add=message))

    def abort(self, request_id: str) -> None:
        self._requests.put(pb.CoreRequest(abort=pb.AbortRequest(request_id=request_id)))

    def half_close(self) -> None:
        self._requests.put(None)

    def stats(self) -> pb.StatsResponse:
        return self.stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)

    def close(self) -> None:
        self.half_close()
        self.channel.close()


@dataclass
class Served:
    """A running server. `thread` ends when the loop is drained."""

    socket_path: str
    loop: StepLoop
    service: CoreService
    thread: threading.Thread
    first_token_calls: list[None]

    def client(self) -> Client:
        return Client(self.socket_path)


@pytest.fixture
def serve(tiny: Any, make_core: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Served]]:
    running: list[tuple[Served, CoreServer]] = []

    def start(**changes: Any) -> Served:
        timeline, calls = Timeline(), []  # type: ignore[var-annotated]
        loop = StepLoop(make_core(tiny, **changes), timeline, lambda: calls.append(None))
        service = CoreService(loop, timeline, Identity(generation_id="abc", weights_bytes=123))
        server = CoreServer(service, str(tmp_path / "core.sock"))
        server.serve()
        thread = threading.Thread(target=loop.run)
        thread.start()
        running.append((Served(str(tmp_path / "core.sock"), loop, service, thread, calls), server))
        return running[-1][0]

    yield start
    for served, server in running:
        served.service.drain(0)
        served.thread.join(TIMEOUT_S)
        server.stop()
        assert not served.thread.is_alive()


def collect(stream: Any) -> dict[str, list[pb.RequestOutput]]:
    """Outputs by request until the stream ends."""
    outputs: dict[str, list[pb.RequestOutput]] = {}
    for step in stream:
        for output in step.outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[pb.RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_a_stream_generates_and_ends_when_its_requests_do(serve: Any, tiny: Any) -> None:
    client = serve().client()
    client.add("a", [1, 2, 3])
    client.add("b", [4], logprobs=True, num_top_logprobs=3)
    client.half_close()
    got = collect(client.open())
    assert tokens(got["a"]) == tiny.greedy([1, 2, 3], 8)
    assert tokens(got["b"]) == tiny.greedy([4], 8)
    assert got["a"][-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert [len(o.logprobs) for o in got["b"]] == [1] * 8
    assert got["b"][0].logprobs[0].top_ids[0] == got["b"][0].token_ids[0]
    assert got["b"][0].logprobs[0].top_logprobs[0] == got["b"][0].logprobs[0].logprob
    client.close()


def test_zeros_on_the_wire_read_as_the_contract_says(serve: Any, tiny: Any) -> None:
    client = serve().client()
    client.add("r", [1, 2], top_p=0, repetition_penalty=0, top_k=0)
    client.half_close()
    assert tokens(collect(client.open())["r"]) == tiny.greedy([1, 2], 8)
    client.close()


def test_output_ids_resume_a_request(serve: Any, tiny: Any) -> None:
    expected = tiny.greedy([1, 2, 3], 8)
    client = serve().client()
    client.add("r", [1, 2, 3], tuple(expected[:3]))
    client.half_close()
    assert tokens(collect(client.open())["r"]) == expected[3:]
    client.close()


def test_a_bad_request_and_an_aborted_one_leave_the_stream_open(serve: Any, tiny: Any) -> None:
    client = serve(num_blocks=200).client()
    stream = client.open()
    client.add("bad", [1000])
    first = next(stream).outputs[0]
    assert (first.request_id, first.finish_reason) == ("bad", pb.FINISH_REASON_ERROR)
    assert "1000" in first.error
    client.add("long", [1], max_tokens=60)
    assert next(stream).outputs[0].request_id == "long"
    client.abort("long")
    client.add("good", [2, 3])
    client.half_close()
    got = collect(stream)
    assert got["long"][-1].finish_reason == pb.FINISH_REASON_ABORT
    assert tokens(got["good"]) == tiny.greedy([2, 3], 8)
    client.close()


def test_a_second_stream_is_refused_and_harms_the_first_not(serve: Any) -> None:
    served = serve()
    client, other = served.client(), served.client()
    stream = client.open()
    client.add("a", [1])
    next(stream)
    other.half_close()
    with pytest.raises(grpc.RpcError) as refusal:
        next(other.open())
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "open already" in refusal.value.details()
    client.half_close()
    assert collect(stream)["a"][-1].finish_reason == pb.FINISH_REASON_LENGTH
    client.close()
    other.close()


def test_requests_of_a_broken_stream_are_dropped_and_the_next_stream_works(
    serve: Any, tiny: Any, wait_for: Any
) -> None:
    served = serve()
    client = served.client()
    stream = client.open()
    for i in range(12):
        client.add(str(i), [i], max_tokens=60)
    next(stream)
    stream.cancel()
    second = served.client()
    wait_for(lambda: served.loop.core.num_requests == 0, "the requests to be dropped")
    stats = second.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    second.add("r", [1, 2])
    second.half_close()
    assert tokens(collect(second.open())["r"]) == tiny.greedy([1, 2], 8)
    client.close()
    second.close()


def test_drain_finishes_what_runs_refuses_what_comes_and_ends_the_loop(serve: Any, tiny: Any) -> None:
    served = serve()
    client = served.client()
    stream = client.open()
    client.add("r", [1, 2, 3], max_tokens=30)
    got = list(next(stream).outputs)
    assert client.stub.Drain(pb.DrainRequest(deadline_ms=20_000), timeout=TIMEOUT_S).num_running <= 1
    other = served.client()
    other.half_close()
    with pytest.raises(grpc.RpcError, match="FAILED_PRECONDITION"):
        next(other.open())
    for step in stream:
        got += step.outputs
    assert tokens(got) == tiny.greedy([1, 2, 3], 30)
    served.thread.join(TIMEOUT_S)
    assert not served.thread.is_alive()
    client.close()
    other.close()


def test_a_drain_whose_deadline_passes_ends_without_finishing(serve: Any) -> None:
    served = serve()
    client = served.client()
    stream = client.open()
    for i in range(40):
        client.add(str(i), [i], max_tokens=60)
    next(stream)
    client.stub.Drain(pb.DrainRequest(deadline_ms=0), timeout=TIMEOUT_S)
    finished = [o for step in stream for o in step.outputs if o.finish_reason]
    served.thread.join(TIMEOUT_S)
    assert not served.thread.is_alive()
    assert len(finished) < 40
    client.close()


def test_stats_count_and_the_first_token_is_a_phase(serve: Any, wait_for: Any) -> None:
    served = serve()
    client = served.client()
    client.add("bad", [])
    client.add("r", [1, 2, 3])
    client.add("s", [4, 5])
    client.half_close()
    collect(client.open())
    wait_for(lambda: served.first_token_calls, "the first token to be noted")
    stats = client.stats()
    assert (stats.generation_id, stats.pid, stats.weights_bytes) == ("abc", os.getpid(), 123)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (5, 16)
    assert 8 <= stats.num_steps <= 16
    assert (stats.max_model_len, stats.max_num_seqs, stats.block_size, stats.num_kv_blocks) == (64, 8, 4, 64)
    assert [phase.name for phase in stats.phases] == ["first_token"]
    assert stats.phases[0].end_ns > stats.phases[0].start_ns
    assert len(served.first_token_calls) == 1
    client.close()


def test_a_refused_first_request_does_not_hide_the_first_token_of_one_that_came_with_it(
    tiny: Any, make_core: Callable[..., Any]
) -> None:
    timeline, calls = Timeline(), []
    loop = StepLoop(make_core(tiny), timeline, lambda: calls.append(None))
    for request_id, prompt in (("bad", []), ("r", [1, 2, 3])):  # both before the first step
        add = pb.AddRequest(request_id=request_id, prompt_ids=prompt, sampling=pb.SamplingParams(max_tokens=2))
        loop.inbox.put(RequestArrived(pb.CoreRequest(add=add), now_ns()))
    loop.inbox.put(DrainAsked(now_ns() + 10 * 10**9))
    loop.run()
    assert [phase.name for phase in timeline.phases] == ["first_token"]
    assert len(calls) == 1


def test_the_socket_is_private_and_health_says_serving(serve: Any) -> None:
    served = serve()
    assert stat.S_IMODE(os.stat(served.socket_path).st_mode) == 0o600
    with grpc.insecure_channel(f"unix:{served.socket_path}") as channel:
        for service in ("", "preload.engine_core.v1.EngineCore"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_socket_path_that_is_too_long_or_unusable_is_refused(tiny: Any, make_core: Any, tmp_path: Path) -> None:
    loop = StepLoop(make_core(tiny), Timeline())
    service = CoreService(loop, Timeline(), Identity(generation_id="", weights_bytes=0))
    with pytest.raises(CoreError, match="Linux allows 107"):
        CoreServer(service, "/tmp/" + "x" * 110)
    with pytest.raises(CoreError, match="cannot listen on"):
        CoreServer(service, str(tmp_path / "missing" / "core.sock"))
