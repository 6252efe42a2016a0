"""The core as a process: attached to a real daemon, over its real socket, until it is killed or drained."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from preload.engine.core.config import CoreConfig
from preload.engine.recipe import Recipe
from preload.engine.timeline import now_ns
from preload.protos import engine_core_pb2 as pb
from preload.protos import engine_core_pb2_grpc as pb_grpc
from preload.protos.weight_cache_pb2 import Selector

TIMEOUT_S = 60
PHASES = ["exec", "imports", "attach", "build", "kv_cache", "warm_up", "ready"]


class CoreUnderTest:
    """One core process and a channel to it."""

    def __init__(self, config: CoreConfig, log: Path) -> None:
        self.config = config
        self.log = log
        command = [sys.executable, "-P", "-m", "preload.engine.core", "--config-json", config.to_json()]
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.channel = grpc.insecure_channel(
            f"unix:{config.socket_path}", options=[("grpc.max_reconnect_backoff_ms", 100)]
        )
        self.stub = pb_grpc.EngineCoreStub(self.channel)

    def serving(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            answer = health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def generate(self, prompt: list[int], output_ids: Sequence[int] = (), **sampling: Any) -> list[int]:
        params = pb.SamplingParams(**{"max_tokens": 8, **sampling})
        request = pb.AddRequest(request_id="r", prompt_ids=prompt, output_ids=output_ids, sampling=params)
        stream = self.stub.Generate(iter([pb.CoreRequest(add=request)]), timeout=TIMEOUT_S)
        return [t for step in stream for output in step.outputs for t in output.token_ids]

    def stats(self) -> pb.StatsResponse:
        return self.stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)

    def end(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def start_core(tmp_path: Path, wait_for: Any) -> Iterator[Callable[..., CoreUnderTest]]:
    cores: list[CoreUnderTest] = []

    def start(daemon: Any, wait: bool = True, **settings: Any) -> CoreUnderTest:
        number = len(cores)
        config = CoreConfig(
            runtime_dir=str(daemon.runtime_dir),
            socket_path=str(tmp_path / f"core{number}.sock"),
            num_threads=1,
            spawned_at_ns=now_ns(),
            **settings,
        )
        cores.append(CoreUnderTest(config, tmp_path / f"core{number}.log"))
        if wait:
            wait_for(cores[-1].serving, "the core to serve")
        return cores[-1]

    yield start
    for core in cores:
        core.end()


@pytest.fixture
def checkpoint(tiny: Any, tmp_path: Path) -> Path:
    tiny.oracle.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_core_serves_reports_its_phases_and_drains_on_sigterm(
    daemon: Any, checkpoint: Path, start_core: Any, tiny: Any, wait_for: Any
) -> None:
    generation = daemon.load(checkpoint)
    core = start_core(daemon, checkpoint=str(checkpoint))
    assert [phase.name for phase in core.stats().phases] == PHASES
    assert core.generate([1, 2, 3]) == tiny.greedy([1, 2, 3], 8)
    stats = core.stats()
    assert [phase.name for phase in stats.phases] == [*PHASES, "first_token"]
    assert all(phase.end_ns >= phase.start_ns > 0 for phase in stats.phases)
    assert (stats.generation_id, stats.pid) == (generation.id, core.process.pid)
    assert (stats.weights_bytes, stats.max_model_len) == (generation.resident_bytes, 64)

    def reported() -> bool:
        leases = [lease for lease in daemon.generations()[0].leases if lease.pid == core.process.pid]
        return [phase.name for phase in leases[0].phases] == [*PHASES, "first_token"]

    wait_for(reported, "the daemon to know the core's phases")
    core.process.send_signal(signal.SIGTERM)
    assert core.process.wait(TIMEOUT_S) == 0
    wait_for(lambda: not daemon.generations()[0].leases, "the lease to end")


def test_a_core_attaches_by_generation_id_and_knows_its_limits(
    daemon: Any, checkpoint: Path, start_core: Any, tiny: Any
) -> None:
    generation = daemon.load(checkpoint, quantization="bf16")
    core = start_core(daemon, generation_id=generation.id, max_model_len=32, block_size=32, max_num_seqs=2)
    stats = core.stats()
    assert (stats.max_model_len, stats.block_size, stats.max_num_seqs) == (32, 32, 2)
    assert stats.num_kv_blocks == 2 * 32 / 32
    assert len(core.generate([5], max_tokens=100)) == 31


@pytest.mark.host_only
def test_a_core_multiplies_in_bfloat16_if_it_is_told_to_and_says_so(
    daemon: Any, tiny_model: Any, start_core: Any, tmp_path: Path
) -> None:
    tiny_model(intermediate_size=64, head_dim=32).oracle.save_pretrained(tmp_path / "tiny")
    generation = daemon.load(tmp_path / "tiny", quantization="int8_per_channel")
    core = start_core(daemon, generation_id=generation.id, matmul_precision="medium")
    kernels = core.stats().kernels
    if "bfloat16" not in kernels:
        pytest.skip(f"this CPU multiplies no bfloat16: {kernels}")
    assert re.search(r"products of more than [48] tokens in bfloat16; keys and values in bfloat16", kernels)
    assert len(core.generate([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8


@pytest.mark.host_only
def test_keys_and_values_in_bfloat16_take_half_the_memory(
    daemon: Any, tiny_model: Any, start_core: Any, tmp_path: Path
) -> None:
    model = tiny_model(head_dim=32)
    model.oracle.save_pretrained(tmp_path / "tiny")
    generation = daemon.load(tmp_path / "tiny")
    whole = start_core(daemon, generation_id=generation.id)
    if not re.search(r"\b(avx512_bf16|amx_bf16)\b", Path("/proc/cpuinfo").read_text()):
        pytest.skip("this CPU multiplies no bfloat16")
    half = start_core(daemon, generation_id=generation.id, kv_cache_dtype="bfloat16")
    assert half.stats().num_kv_blocks == whole.stats().num_kv_blocks
    assert half.stats().kv_cache_bytes * 2 == whole.stats().kv_cache_bytes
    assert half.generate([1, 2, 3]) == model.greedy([1, 2, 3], 8)


@pytest.mark.host_only
def test_keys_and_values_that_nothing_computes_with_are_refused_in_one_line(
    daemon: Any, checkpoint: Path, start_core: Any
) -> None:
    daemon.load(checkpoint, compute_dtype="bfloat16")
    core = start_core(
        daemon, wait=False, checkpoint=str(checkpoint), compute_dtype="bfloat16", kv_cache_dtype="float32"
    )
    assert core.process.wait(TIMEOUT_S) == 2
    assert "kv_cache_dtype is float32, and kernels that compute in bfloat16" in core.log.read_text()


@pytest.mark.parametrize("quantization", ["int8_per_channel", "int4_group32", "nvfp4"])
def test_a_core_only_reads_quantized_weights(
    daemon: Any, tiny_model: Any, start_core: Any, tmp_path: Path, quantization: str
) -> None:
    model = tiny_model(intermediate_size=64)
    model.oracle.save_pretrained(tmp_path / "tiny")
    generation = daemon.load(tmp_path / "tiny", quantization=quantization)
    core = start_core(daemon, generation_id=generation.id)
    assert len(core.generate([1, 2, 3])) == 8
    with daemon.control() as control:
        *_, last = control.verify(Selector(generation_id=generation.id))
    assert last.verified.num_tensors > 0


@pytest.mark.by_descriptor
def test_a_core_goes_on_while_its_daemon_is_gone_and_back(
    daemon: Any, checkpoint: Path, start_core: Any, tiny: Any
) -> None:
    daemon.load(checkpoint)
    core = start_core(daemon, checkpoint=str(checkpoint))
    daemon.kill()
    assert core.generate([1, 2, 3]) == tiny.greedy([1, 2, 3], 8)
    daemon.start()
    assert core.generate([4, 5], max_tokens=5) == tiny.greedy([4, 5], 5)
    assert core.process.poll() is None


def test_a_drain_over_the_wire_ends_the_process_with_0(daemon: Any, checkpoint: Path, start_core: Any) -> None:
    daemon.load(checkpoint)
    core = start_core(daemon, checkpoint=str(checkpoint))
    core.stub.Drain(pb.DrainRequest(deadline_ms=5000), timeout=TIMEOUT_S)
    assert core.process.wait(TIMEOUT_S) == 0


def test_a_core_that_cannot_attach_says_why_in_one_line(
    daemon: Any, checkpoint: Path, raw_checkpoint: Path, start_core: Any
) -> None:
    core = start_core(daemon, wait=False, checkpoint=str(checkpoint))
    assert core.process.wait(TIMEOUT_S) == 3
    assert core.log.read_text().count("\n") == 1
    assert str(checkpoint) in core.log.read_text()
    generation = daemon.load(raw_checkpoint, model="raw")
    raw = start_core(daemon, wait=False, generation_id=generation.id)
    assert raw.process.wait(TIMEOUT_S) == 3
    assert "without a model" in raw.log.read_text()


def test_a_core_whose_cache_cannot_hold_one_sequence_says_the_numbers(
    daemon: Any, checkpoint: Path, start_core: Any
) -> None:
    daemon.load(checkpoint)
    core = start_core(daemon, wait=False, checkpoint=str(checkpoint), kv_cache_bytes=1000)
    assert core.process.wait(TIMEOUT_S) == 2
    assert "KV cache of 1000 bytes" in core.log.read_text()


def test_a_memory_utilization_has_the_largest_step_measured_once(
    daemon: Any, checkpoint: Path, start_core: Any, tiny: Any
) -> None:
    generation = daemon.load(checkpoint)
    lines = []
    for _ in range(2):
        core = start_core(daemon, checkpoint=str(checkpoint), memory_utilization=0.9)
        stats = core.stats()
        lines.append(core.log.read_text())
        assert core.generate([1, 2, 3]) == tiny.greedy([1, 2, 3], 8)
        core.end()
        assert stats.memory.has_peak
        taken = generation.resident_bytes + stats.memory.core_bytes + stats.memory.peak_bytes
        assert taken + stats.kv_cache_bytes <= 0.9 * stats.memory.total_bytes
    assert all("its largest step" in line for line in lines)
    assert len(list((daemon.runtime_dir / "profiles").iterdir())) == 1


def test_a_wrong_configuration_ends_with_2_and_names_the_setting() -> None:
    command = [sys.executable, "-P", "-m", "preload.engine.core", "--config-json", '{"bogus": 1}']
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 2
    assert "bogus" in ended.stderr


def test_a_core_dies_with_its_parent(daemon: Any, checkpoint: Path, tmp_path: Path, wait_for: Any) -> None:
    daemon.load(checkpoint)
    socket_path = tmp_path / "core.sock"
    config = CoreConfig(
        runtime_dir=str(daemon.runtime_dir), checkpoint=str(checkpoint), socket_path=str(socket_path), num_threads=1
    )
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'preload.engine.core', '--config-json', sys.argv[1]])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", script, config.to_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_for(socket_path.exists, "the core to listen")
        parent.kill()
    wait_for(lambda: _gone(child), "the core to die with its parent")


def _gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has reaped yet has."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_core_whose_parent_is_gone_already_does_not_start(daemon: Any, checkpoint: Path, start_core: Any) -> None:
    daemon.load(checkpoint)
    core = start_core(daemon, wait=False, checkpoint=str(checkpoint), parent_pid=os.getppid())
    assert core.process.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_broken_invariant_ends_the_process_with_a_traceback(
    daemon: Any, checkpoint: Path, start_core: Any, tmp_path: Path
) -> None:
    daemon.load(checkpoint)
    config = CoreConfig(
        runtime_dir=str(daemon.runtime_dir), checkpoint=str(checkpoint), socket_path=str(tmp_path / "b.sock"),
        num_threads=1,
    )  # fmt: skip
    script = (
        "import sys\n"
        "from preload.engine.core import core, process\n"
        "def broken(self): raise AssertionError('block 7 is owned twice')\n"
        "core.EngineCore.step = broken\n"
        "process.main(1, ['--config-json', sys.argv[1]])\n"
    )
    command = [sys.executable, "-c", script, config.to_json()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        with grpc.insecure_channel(f"unix:{config.socket_path}") as channel:
            request = pb.CoreRequest(add=pb.AddRequest(request_id="r", prompt_ids=[1]))
            stream = pb_grpc.EngineCoreStub(channel).Generate(iter([request]), timeout=TIMEOUT_S, wait_for_ready=True)
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                next(stream)
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr is not None
        assert "block 7 is owned twice" in process.stderr.read()


def test_a_standby_serves_nothing_until_it_is_promoted_and_then_as_any_other(
    daemon: Any, checkpoint: Path, start_core: Any, tiny: Any, wait_for: Any
) -> None:
    daemon.load(checkpoint)
    core = start_core(daemon, wait=False, checkpoint=str(checkpoint), standby=True)
    stats = core.stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    assert stats.standby
    assert [phase.name for phase in stats.phases] == PHASES
    assert stats.num_kv_blocks == 1
    assert not core.serving()
    with pytest.raises(grpc.RpcError, match="promote it first"):
        core.generate([1, 2, 3])
    promoted = core.stub.Promote(pb.PromoteRequest(), timeout=TIMEOUT_S)
    assert core.serving()
    stats = core.stats()
    assert (stats.standby, stats.kv_cache_bytes) == (False, promoted.kv_cache_bytes)
    assert stats.num_kv_blocks > 1
    assert core.generate([1, 2, 3]) == tiny.greedy([1, 2, 3], 8)
    assert core.stub.Promote(pb.PromoteRequest(), timeout=TIMEOUT_S) == promoted


def test_a_standby_whose_cache_does_not_fit_says_so_when_it_is_promoted(
    daemon: Any, checkpoint: Path, start_core: Any
) -> None:
    daemon.load(checkpoint)
    core = start_core(daemon, wait=False, checkpoint=str(checkpoint), standby=True, kv_cache_bytes=1000)
    with pytest.raises(grpc.RpcError) as refused:
        core.stub.Promote(pb.PromoteRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "KV cache of 1000 bytes" in refused.value.details()
    assert core.process.poll() is None


def load_draft(daemon: Any, checkpoint: Path, **recipe: Any) -> Any:
    with daemon.control() as control:
        *_, last = control.load(checkpoint, Recipe(**recipe), role="draft", timeout_s=TIMEOUT_S)
    return last.loaded


@pytest.mark.parametrize("standby", [False, True])
def test_a_draft_model_is_attached_beside_the_model_and_changes_no_answer(
    daemon: Any, checkpoint: Path, start_core: Any, tiny: Any, wait_for: Any, standby: bool
) -> None:
    target, draft = daemon.load(checkpoint), load_draft(daemon, checkpoint, quantization="bf16")
    core = start_core(
        daemon, wait=not standby, checkpoint=str(checkpoint), speculate="draft", num_draft_tokens=3,
        draft_checkpoint=str(checkpoint), draft_quantization="bf16", kv_cache_bytes=1 << 20, standby=standby,
    )  # fmt: skip
    if standby:
        core.stub.Promote(pb.PromoteRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    leases = {g.rank.role: [lease.pid for lease in g.leases] for g in daemon.generations()}
    assert leases == {"target": [core.process.pid], "draft": [core.process.pid]}
    assert target.id != draft.id
    assert core.generate([1, 2, 3], max_tokens=30) == tiny.greedy([1, 2, 3], 30)
    stats = core.stats()
    assert "drafts by a model of 2 layers" in stats.speculation
    assert len(stats.num_drafted_tokens) == 3
    assert stats.num_drafted_tokens[0] >= stats.num_accepted_tokens[0] > 5
    # Both storages come out of the memory that was given: 2 layers of 2 · 16 · 2 · 16 floats each.
    assert stats.num_kv_blocks == (1 << 20) // (2 * 2 * 2 * 16 * 2 * 16 * 4) - 1
    assert stats.kv_cache_bytes == 1 << 20
    core.process.send_signal(signal.SIGTERM)
    assert core.process.wait(TIMEOUT_S) == 0
    wait_for(lambda: not any(g.leases for g in daemon.generations()), "both leases to end")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_what_a_killed_core_began_is_continued_by_another_that_speculates(
    daemon: Any, checkpoint: Path, start_core: Any, sampling: dict[str, Any]
) -> None:
    daemon.load(checkpoint)
    prompt = [4, 5, 6, 7] * 4
    plain = start_core(daemon, checkpoint=str(checkpoint)).generate(prompt, max_tokens=40, **sampling)
    first = start_core(daemon, checkpoint=str(checkpoint), speculate="ngram")
    request = pb.AddRequest(request_id="r", prompt_ids=prompt, sampling=pb.SamplingParams(max_tokens=40, **sampling))
    begun: list[int] = []
    for step in first.stub.Generate(iter([pb.CoreRequest(add=request)]), timeout=TIMEOUT_S):
        begun += step.outputs[0].token_ids
        if len(begun) > 5:
            break
    first.process.kill()
    first.process.wait()
    second = start_core(daemon, checkpoint=str(checkpoint), speculate="ngram")
    assert begun + second.generate(prompt, begun, max_tokens=40, **sampling) == plain


def test_draft_models_that_do_not_fit_are_refused_in_one_line(
    daemon: Any, checkpoint: Path, tiny_model: Any, start_core: Any, tmp_path: Path
) -> None:
    tiny_model(vocab_size=50).oracle.save_pretrained(tmp_path / "other")
    daemon.load(checkpoint)
    load_draft(daemon, tmp_path / "other")
    core = start_core(
        daemon, wait=False, checkpoint=str(checkpoint), speculate="draft", draft_checkpoint=str(tmp_path / "other")
    )
    assert core.process.wait(TIMEOUT_S) == 2
    assert "vocabulary of 50 tokens" in core.log.read_text()
    core = start_core(daemon, wait=False, checkpoint=str(checkpoint), speculate="mtp")
    assert core.process.wait(TIMEOUT_S) == 2
    assert "no multi-token-prediction head" in core.log.read_text()
