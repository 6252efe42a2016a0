"""The demo model on native kernels: with drafts it answers token for token, and draws, what it does without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.core.speculation.build import speculate
from preload.engine.layers.native_ops import native_ops
from preload.engine.models.decoder import Decoder
from preload.engine.quantization import int4_group32
from preload.engine.quantization.layouts import dequantize

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2-greedy.json").read_text())["cases"]


@pytest.fixture(scope="module")
def target(open_library: Any, demo_weights: Any) -> Decoder:
    spec, tensors, layouts = demo_weights
    return Decoder(spec, tensors, layouts, torch.float32, native_ops(open_library("native", 2), torch.float32))


@pytest.fixture(scope="module")
def draft(open_library: Any, demo_weights: Any) -> Decoder:
    """The same model in int4_group32."""
    spec, tensors, layouts = demo_weights
    made, tags = {}, {}
    for name, tensor in tensors.items():
        parts = {"weight": tensor}
        if layouts[name] != "dense":
            parts = int4_group32.quantize(dequantize(layouts[name], parts))
        for part, value in parts.items():
            key = name if part == "weight" else f"{name}_{part}"
            made[key], tags[key] = value, "dense" if layouts[name] == "dense" else "int4_group32"
    return Decoder(spec, made, tags, torch.float32, native_ops(open_library("native", 2), torch.float32))


def make_core(target: Decoder, method: str, draft: Decoder, **limits: int) -> EngineCore:
    settings = {"num_blocks": 64, "max_model_len": 512, "max_num_seqs": 8, **limits}
    core = EngineCore(target, **settings)  # type: ignore[arg-type]
    if method != "plain":
        used = draft if method == "draft" else None
        speculate(core, method, num_draft_tokens=4, draft=used, adaptive=False)
    return core


def asked(make_request: Any) -> list[Any]:
    """The recorded prompts; again with their answers before them, which invites repetition; and drawn answers."""
    requests = []
    for case in CASES:
        twice = [*case["prompt_ids"], *case["greedy_ids"], *case["prompt_ids"]]
        requests += [
            make_request(case["name"], case["prompt_ids"], max_tokens=32),
            make_request(f"{case['name']} again", twice, max_tokens=32),
            make_request(f"{case['name']} drawn", twice, max_tokens=20, temperature=0.7, top_p=0.9, seed=6),
        ]
    return requests


@pytest.fixture(scope="module")
def plain(target: Decoder, draft: Decoder) -> dict[str, list[int]]:
    return {}


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 15, "token_budget": 24}], ids=["ample", "preempting, chunked"])
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_answers_are_those_without_speculation(
    target: Decoder, draft: Decoder, make_request: Any, run_core: Any, plain: dict[str, list[int]],
    method: str, limits: dict[str, int],
) -> None:  # fmt: skip
    if not plain:
        got = run_core(make_core(target, "plain", draft), *asked(make_request))
        plain.update({name: entry.token_ids for name, entry in got.items()})
        assert all(plain[case["name"]] == case["greedy_ids"] for case in CASES)
    core = make_core(target, method, draft, **limits)
    got = run_core(core, *asked(make_request))
    assert {name: entry.token_ids for name, entry in got.items()} == plain
    assert core.speculator is not None
    assert sum(core.speculator.acceptance.num_accepted) > 40
    assert not limits or core.scheduler.num_preemptions > 0
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable
