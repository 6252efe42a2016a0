"""The engine core's socket, and that of the template it may be forked from, under attack."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from preload.engine.core.config import CoreConfig
from preload.protos import engine_core_pb2 as pb
from preload.protos import engine_core_pb2_grpc as pb_grpc
from preload.protos import template_pb2

SERVICE = "/preload.engine_core.v1.EngineCore/"
# Drain ends a core, which is what it is for; Promote and Stats take nothing.
METHODS = {
    SERVICE + "Generate": pb.CoreRequest,
    SERVICE + "Promote": pb.PromoteRequest,
    SERVICE + "Stats": pb.StatsRequest,
    "/grpc.health.v1.Health/Check": pb.StatsRequest,
    "/grpc.health.v1.Health/Watch": pb.StatsRequest,
}


class Core:
    """A core process with a tiny random model, and a stub to it."""

    def __init__(self, runtime_dir: Path, checkpoint: Path, folder: Path) -> None:
        self.path = str(folder / "core.sock")
        self._log = folder / "core.log"
        config = CoreConfig(
            runtime_dir=str(runtime_dir), socket_path=self.path, checkpoint=str(checkpoint), num_threads=1
        )
        command = [sys.executable, "-P", "-m", "preload.engine.core", "--config-json", config.to_json()]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def serves(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            with grpc.insecure_channel(f"unix:{self.path}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def generate(self) -> list[int]:
        """The greedy continuation of a fixed prompt; waits while somebody else has the stream."""
        request = pb.AddRequest(request_id="r", prompt_ids=[1, 2, 3], sampling=pb.SamplingParams(max_tokens=8))
        with grpc.insecure_channel(f"unix:{self.path}") as channel:
            stream = pb_grpc.EngineCoreStub(channel).Generate(iter([pb.CoreRequest(add=request)]), timeout=5)
            return [token for step in stream for output in step.outputs for token in output.token_ids]


@pytest.fixture
def core(
    daemon: Any, tmp_path: Path, wait_for: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> Iterator[Core]:
    checkpoint = write_llama(tiny_config, tiny_weights(tiny_config))
    daemon.load(checkpoint)
    core = Core(daemon.runtime_dir, checkpoint, tmp_path)
    try:
        wait_for(core.serves, "the core to serve")
        yield core
    finally:
        core.process.kill()
        core.process.wait()


def test_the_cores_socket(core: Core, attack: Any, fuzzing: Any, wait_for: Callable[..., Any]) -> None:
    expected = core.generate()
    assert len(expected) == 8

    def good() -> None:
        def answered() -> bool:
            try:
                return core.generate() == expected
            except grpc.RpcError:  # an attacker's stream may be open yet
                return False

        wait_for(answered, "the core to answer what it answered before")

    door = fuzzing.StreamDoor(core.path, METHODS, burst=300)
    attack("the core's socket", core.process, lambda: core.log, good, door)


def test_the_templates_socket(template: Any, attack: Any, fuzzing: Any) -> None:
    current = template.request().fingerprint

    def packet(rng: random.Random) -> bytes:
        request = fuzzing.random_message(rng, template_pb2.ForkRequest)
        if rng.random() < 0.5:
            request = template_pb2.ForkRequest(
                arguments=["--config-json", "{}"], working_directory=fuzzing.junk(rng, 50)
            )
        # A request of other code makes a template step down, which is no fault.
        request.fingerprint = current
        data = request.SerializeToString()
        return data if rng.random() < 0.6 else fuzzing.junk(rng, 200_000)

    def good() -> None:
        fork = template.fork("--config-json", "{", fingerprint=current)
        try:
            assert fork.exit_code() == 2, "a core with a wrong configuration says so"
        finally:
            fork.close()

    class Door(fuzzing.PacketDoor):  # type: ignore[misc]
        """A mutation may hit the fingerprint: bytes are mutated only where that of other code does not come of it."""

        gives = True

        def mutated(self, rng: random.Random, data: bytes) -> bytes:
            changed: bytes = fuzzing.mutate(rng, data)
            return data if self._is_of_other_code(changed) else changed

        def _is_of_other_code(self, data: bytes) -> bool:
            try:
                found = template_pb2.ForkRequest.FromString(data).fingerprint
            except DecodeError:
                return False
            return found != current and len(found) == len(current)

    door = Door(template.place.socket, packet, burst=300)
    attack("the template's socket", template.process, lambda: template.log, good, door)
