"""/health, /ready and /metrics over HTTP, and grpc.health.v1."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from preload.engine.client import attach
from preload.engine.errors import CheckpointError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")


def get(daemon: Any, path: str) -> tuple[int, str]:
    with daemon.control() as control:
        url = f"http://{control.list().http_address}{path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(daemon: Any, name: str) -> float | None:
    found = re.search(rf"^{re.escape(name)} (\S+)$", get(daemon, "/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else None


def test_health_answers_while_the_loop_turns(daemon: Any) -> None:
    status, body = get(daemon, "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok", "epoch": 1})


def test_ready_without_configured_models(daemon: Any) -> None:
    status, body = get(daemon, "/ready")
    assert (status, json.loads(body)) == (200, {"ready": True, "draining": False, "missing": []})


def test_ready_lists_what_is_missing_and_why_until_it_is_there(
    make_daemon: Callable[..., Any], llama: Any, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    good, bad = llama.folder(tmp_path / "good"), tmp_path / "bad"
    config = tmp_path / "config.toml"
    config.write_text(f"[[models]]\ncheckpoint = '{good}'\n[[models]]\ncheckpoint = '{bad}'\n")
    bad.mkdir()
    daemon = make_daemon("--config", str(config))

    def missing() -> dict[str, tuple[str, str]]:
        status, body = get(daemon, "/ready")
        answer = json.loads(body)
        assert (status, answer["ready"]) == ((503, False) if answer["missing"] else (200, True))
        return {m["checkpoint"]: (m["state"], m["reason"]) for m in answer["missing"]}

    wait_for(lambda: missing().get(str(bad), ("", ""))[0] == "FAILED" and str(good) not in missing(), "both loads")
    assert f"{bad} holds no .safetensors and no .gguf file" in missing()[str(bad)][1]
    with daemon.control() as control:
        assert list(control.list().missing_models) == [str(bad)]
    llama.folder(bad)
    daemon.load(bad)
    assert missing() == {}


def test_a_configured_model_whose_file_is_missing_says_so_everywhere_and_in_the_log_once(
    make_daemon: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    config, absent = tmp_path / "config.toml", tmp_path / "absent.gguf"
    config.write_text(
        f"[[models]]\ncheckpoint = '{absent}'\n[[models]]\ncheckpoint = '{absent}'\nquantization = 'bf16'\n"
    )
    daemon = make_daemon("--config", str(config))
    wait_for(lambda: len(daemon.generations()) == 2, "both to fail")
    status, body = get(daemon, "/ready")
    missing = json.loads(body)["missing"]
    assert status == 503
    assert [(m["state"], m["quantization"]) for m in missing] == [("FAILED", "keep"), ("FAILED", "bf16")]
    assert all("No such file" in m["reason"] for m in missing)
    for generation in daemon.generations():
        assert generation.failure.reason == pb.CHECKPOINT_NOT_FOUND
        assert list(generation.checkpoint_paths) == [str(absent)]
    failed = [line for line in daemon.log.splitlines() if "FAILED" in line and str(absent) in line]
    assert len(failed) == 2


def test_a_model_that_is_still_loading_is_missing(
    make_daemon: Callable[..., Any], gate: Any, raw_checkpoint: Path, wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    """The fake daemon reads no file; what it loads on boot is what counts, so evict and load again."""
    from preload.engine.client.control import make_selector

    config = tmp_path / "config.toml"
    config.write_text(f"[[models]]\ncheckpoint = '{raw_checkpoint}'\nmodel = 'raw'\n")
    daemon = make_daemon("--config", str(config))
    wait_for(lambda: get(daemon, "/ready")[0] == 200, "the model to be READY")
    with daemon.control() as control:
        control.evict(make_selector(raw_checkpoint, recipe=RAW))
    status, body = get(daemon, "/ready")
    assert (status, json.loads(body)["missing"][0]["state"]) == (503, "ABSENT")
    daemon.load(raw_checkpoint, model="raw")
    assert get(daemon, "/ready")[0] == 200


def test_metrics_tell_of_residents_leases_attaches_and_loads(
    daemon: Any, raw_checkpoint: Path, tmp_path: Path, tested_device: str
) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\xff" * 100)
    for path in (bad, tmp_path / "absent"):
        with pytest.raises(CheckpointError):
            daemon.load(path, model="raw")
    with attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers"):
        assert metric(daemon, "preload_leases") == 1
    labels = f'{{generation="{loaded.id[:12]}",path="{raw_checkpoint}"}}'
    assert metric(daemon, f"preload_generation_bytes{labels}") == loaded.resident_bytes
    device = f'{{device="{tested_device}"}}'
    assert metric(daemon, f"preload_device_resident_bytes{device}") == loaded.resident_bytes
    assert metric(daemon, f"preload_device_reserved_bytes{device}") == 0
    assert metric(daemon, f"preload_device_capacity_bytes{device}") == daemon.device().capacity_bytes
    assert metric(daemon, 'preload_generations{state="READY"}') == 1
    assert metric(daemon, 'preload_generations{state="FAILED"}') == 1
    assert metric(daemon, "preload_attaches_total") == 1
    assert metric(daemon, "preload_attach_seconds_count") == 1
    assert (metric(daemon, "preload_attach_seconds_sum") or 0) > 0
    assert metric(daemon, 'preload_loads_total{result="ok"}') == 1
    assert metric(daemon, 'preload_loads_total{result="failed"}') == 2
    assert metric(daemon, 'preload_load_failures_total{reason="BAD_CHECKPOINT"}') == 1
    assert metric(daemon, 'preload_load_failures_total{reason="CHECKPOINT_NOT_FOUND"}') == 1
    assert metric(daemon, "preload_epoch") == 1


def health(daemon: Any, service: str) -> int:
    with grpc.insecure_channel(f"unix:{daemon.runtime_dir / 'daemon.sock'}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status
    return status


def test_grpc_health_serves_for_the_server_and_the_service(daemon: Any) -> None:
    for service in ("", pb.DESCRIPTOR.services_by_name["WeightCache"].full_name):
        assert health(daemon, service) == health_pb2.HealthCheckResponse.SERVING


def test_a_draining_daemon_is_neither_ready_nor_serving(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, hold: Callable[..., Any]
) -> None:
    """A holder that stays keeps the daemon draining: its watcher hears of it, and so does HTTP."""
    daemon = make_daemon("--drain-timeout-s", "20")
    daemon.load(raw_checkpoint, model="raw")
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    with daemon.control() as control:
        url = f"http://{control.list().http_address}/ready"
    with grpc.insecure_channel(f"unix:{daemon.runtime_dir / 'daemon.sock'}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        daemon.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(url, timeout=60)
        assert answer.value.code == 503
        assert json.loads(answer.value.read())["draining"] is True
        watch.cancel()
    holder.end()
    assert daemon.process.wait(60) == 0, "with its last holder gone it need not wait any longer"
