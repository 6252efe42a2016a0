"""Speculation on a real GPU: the answers of plain decoding there, from verifying steps with graphs and without."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.engine.cuda.devices import resolve_device
from preload.engine.recipe import Recipe


@pytest.fixture
def start_core(tmp_path: Path, wait_for: Any) -> Iterator[Callable[..., Any]]:
    path = Path(__file__).parents[1] / "engine" / "test_core_process.py"
    spec = importlib.util.spec_from_file_location("core_process_for_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield from module.start_core.__wrapped__(tmp_path, wait_for)


@pytest.mark.parametrize("graphs", ["off", "before"])
def test_answers_are_those_of_plain_decoding(
    daemon: Any, demo_model: Path, gpu: str, start_core: Callable[..., Any], graphs: str
) -> None:
    """By n-grams, and by the model as its own draft model, all of whose guesses come true."""
    device = resolve_device(gpu)
    prompt = [504, 3575, 282, 4649, 314, 7042, 30, 504, 3575, 282] * 3
    with daemon.control() as control:
        for role in ("target", "draft"):
            *_, last = control.load(demo_model, Recipe(), role=role, device=device, timeout_s=120)
    settings = {"generation_id": "", "checkpoint": str(demo_model), "device": device, "max_model_len": 512,
                "max_num_seqs": 4, "graphs": graphs}  # fmt: skip
    wanted = start_core(daemon, **settings).generate(prompt, max_tokens=48)
    by_ngrams = start_core(daemon, **settings, speculate="ngram")
    drafted = start_core(daemon, **settings, speculate="draft", draft_generation_id=last.loaded.id)
    for core in (by_ngrams, drafted):
        # In float32 what the two kernels of attention find differs in its last bits; this text has no such tie.
        assert core.generate(prompt, max_tokens=48) == wanted
        assert sum(core.stats().num_accepted_tokens) > 0
