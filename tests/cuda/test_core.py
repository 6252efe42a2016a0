"""An engine core on weights in device memory: it computes in place, and a restart of it takes nothing new."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.engine.recipe import Recipe


@pytest.fixture
def start_core(load_module: Callable[[str], Any], tmp_path: Path, wait_for: Any) -> Iterator[Callable[..., Any]]:
    """Core processes, by the same fixture as those on the host."""
    side = load_module("engine/test_core_process.py")
    yield from side.start_core.__wrapped__(tmp_path, wait_for)


def test_a_core_whose_weights_are_gone_ends_and_says_why(
    machine: Any, daemon: Any, device: str, backend: str, tmp_path: Path, load_module: Any, load_on: Any,
    start_core: Any, owner_pid: Any, wait_for: Any,
) -> None:  # fmt: skip
    if backend != "cuda_ipc":
        pytest.skip("descriptors keep memory alive")
    tiny = load_module("fakes/core_side.py").make_tiny_model()
    tiny.oracle.save_pretrained(tmp_path / "tiny")
    load_on(daemon, tmp_path / "tiny", device, model="auto")
    core = start_core(daemon, checkpoint=str(tmp_path / "tiny"), device=device)
    assert core.generate([1, 2, 3])
    os.kill(owner_pid(daemon), signal.SIGKILL)
    assert core.process.wait(60) in (3, -signal.SIGSEGV), "told, or at its next look at a weight"
    wait_for(lambda: machine.used_bytes(0) == 0, "the device's memory to be back")


def test_a_core_on_device_memory_answers_as_on_the_host_and_so_does_its_successor(
    machine: Any, daemon: Any, device: str, tmp_path: Path, load_module: Any, load_on: Any, start_core: Any
) -> None:
    tiny = load_module("fakes/core_side.py").make_tiny_model()
    tiny.oracle.save_pretrained(tmp_path / "tiny")
    generation = load_on(daemon, tmp_path / "tiny", device, model="auto")
    wanted = tiny.greedy([1, 2, 3], 8)
    first = start_core(daemon, checkpoint=str(tmp_path / "tiny"), device=device)
    assert first.generate([1, 2, 3]) == wanted
    live = machine.process(first.process.pid).live
    assert live["mappings"] + live["imports"] == 1
    assert live["allocations"] == 1, "keys and values are allocated through the driver"
    stats = first.stats()
    assert "over the memory of an emulated device" in stats.kernels
    first.process.kill()
    first.process.wait()
    second = start_core(daemon, generation_id=generation.id, device=device)
    assert second.generate([1, 2, 3]) == wanted
    kv_bytes = machine.used_bytes(0) - generation.resident_bytes
    assert stats.kv_cache_bytes <= kv_bytes < stats.kv_cache_bytes + (2 << 20), "as much again, and no more"
    second.process.kill()
    second.process.wait()


@pytest.mark.parametrize("method", ["ngram", "draft", "mtp"])
def test_a_speculating_core_on_device_memory_says_what_a_plain_one_says(
    machine: Any,
    daemon: Any,
    device: str,
    tmp_path: Path,
    load_module: Any,
    load_on: Any,
    start_core: Any,
    method: str,
) -> None:
    """With everything on the device: the model, the drafter's weights, and both their keys and values."""
    checkpoint = tmp_path / "tiny"
    settings: dict[str, Any] = {"speculate": method, "num_draft_tokens": 3}
    tiny = load_module("fakes/core_side.py").make_tiny_model()
    if method == "mtp":
        load_module("engine/test_mtp.py").HeadedModel(lambda: tiny).save(checkpoint)
    else:
        tiny.oracle.save_pretrained(checkpoint)
    load_on(daemon, checkpoint, device, model="auto")
    if method == "draft":
        load_module("fakes/core_side.py").make_tiny_model(num_hidden_layers=1).oracle.save_pretrained(
            tmp_path / "draft"
        )
        with daemon.control() as control:
            *_, last = control.load(tmp_path / "draft", Recipe(), role="draft", device=device, timeout_s=60)
        settings["draft_generation_id"] = last.loaded.id
    prompt = [5, 6, 7, 8] * 4
    wanted = tiny.greedy(prompt, 24)
    core = start_core(daemon, checkpoint=str(checkpoint), device=device, **settings)
    assert core.generate(prompt, max_tokens=24) == wanted
    stats = core.stats()
    assert "over the memory of an emulated device" in stats.kernels
    assert stats.speculation
    assert sum(stats.num_drafted_tokens) > 0
    live = machine.process(core.process.pid).live
    assert live["mappings"] + live["imports"] == (2 if method == "draft" else 1)
    assert live["allocations"] == (1 if method == "ngram" else 2), (
        "a drafter's keys and values are on the device, too"
    )
    core.process.kill()
    core.process.wait()
