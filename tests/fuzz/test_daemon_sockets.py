"""The daemon's three doors under attack: gRPC, hand-over, HTTP."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")
BURST = 1500
SERVICE = "/preload.weight_cache.v1.WeightCache/"
METHODS = {
    SERVICE + "Load": pb.LoadRequest,
    SERVICE + "Attach": pb.AttachRequest,
    SERVICE + "List": pb.ListRequest,
    SERVICE + "Describe": pb.DescribeRequest,
    SERVICE + "Evict": pb.EvictRequest,
    SERVICE + "Verify": pb.VerifyRequest,
    SERVICE + "Check": pb.CheckRequest,
    "/grpc.health.v1.Health/Check": pb.ListRequest,
    "/grpc.health.v1.Health/Watch": pb.ListRequest,
}


@pytest.fixture
def good(daemon: Any, raw_checkpoint: Path) -> Callable[[], None]:
    """Attaching works, and gives the bytes that were loaded."""
    daemon.load(raw_checkpoint, model="raw")
    content = raw_checkpoint.read_bytes()

    def check() -> None:
        with attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
            assert content.endswith(b"".join(bytes(attachment.tensors[name]) for name in "abc"))
        assert [g.state for g in daemon.generations() if g.id == attachment.generation_id] == [
            pb.GENERATION_STATE_READY
        ]

    return check


def test_the_grpc_socket(daemon: Any, good: Callable[[], None], attack: Any, fuzzing: Any) -> None:
    door = fuzzing.StreamDoor(str(daemon.runtime_dir / "daemon.sock"), METHODS, BURST)
    attack("daemon.sock", daemon.process, lambda: daemon.log, good, door)


def test_the_hand_over_socket(daemon: Any, good: Callable[[], None], attack: Any, fuzzing: Any) -> None:
    def packet(rng: random.Random) -> bytes:
        ticket = pb.HandoverRequest(ticket=rng.randbytes(rng.choice((0, 16, 31, 32, 33, 1000))))
        return rng.choice((ticket.SerializeToString(), fuzzing.junk(rng, 1500), fuzzing.junk(rng, 70_000)))

    door = fuzzing.PacketDoor(str(daemon.runtime_dir / "segments.sock"), packet, burst=300)
    attack("segments.sock", daemon.process, lambda: daemon.log, good, door)


def test_the_probes_port(daemon: Any, good: Callable[[], None], attack: Any, fuzzing: Any) -> None:
    with daemon.control() as control:
        address = control.list().http_address

    def answers() -> None:
        good()
        with urllib.request.urlopen(f"http://{address}/ready", timeout=60) as response:
            assert response.status == 200

    door = fuzzing.HttpDoor(int(address.rpartition(":")[2]), ("/health", "/ready", "/metrics", "/x", "*"), burst=300)
    attack("the daemon's HTTP port", daemon.process, lambda: daemon.log, answers, door)
