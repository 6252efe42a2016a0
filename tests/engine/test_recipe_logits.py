"""Every recipe of a tiny model, from its checkpoint through the loader's conversion to logits and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.loading.fill import Filler
from preload.engine.loading.plan import make_plan
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.models.decoder import Decoder
from preload.engine.recipe import QUANTIZATIONS, Recipe

BOUNDS = {
    "keep": 1e-5, "f32": 1e-5, "bf16": 0.02, "int8_per_channel": 0.05, "int4_group32": 0.3, "fp8_per_tensor": 0.1,
    "fp8_per_block": 0.1, "mxfp8": 0.1, "mxfp4": 0.5, "nvfp4": 0.4,
}  # fmt: skip
"""Relative error of the logits, by norm; and at least a hundredth of it is there, or nothing was quantized."""
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    made = tiny_model(hidden_size=128, intermediate_size=256, num_attention_heads=8, vocab_size=200)
    for parameter in made.oracle.parameters():
        if parameter.dim() == 2:  # as large as a trained model's: larger ones make chaos of small errors
            parameter.data.mul_(0.15)
    return made


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    model.oracle.save_pretrained(folder)
    return folder


def load(folder: Path, quantization: str) -> Decoder:
    """What the loader makes resident, as a decoder that reads it there."""
    found, resolved = open_and_resolve(str(folder), Recipe(quantization=quantization))
    plan = make_plan(target for step in resolved.steps for target in step.targets)
    memory = bytearray(plan.segment_bytes[0])

    def write(segment: int, offset: int, data: memoryview) -> None:
        memory[offset : offset + len(data)] = data

    Filler(resolved, plan, write).run(2, lambda done_bytes: None)
    found.close()
    tensors, layouts = {}, {}
    for target in (target for step in resolved.steps for target in step.targets):
        place = plan.places[target.name]
        raw = memoryview(memory)[place.offset : place.offset + target.num_bytes]
        tensors[target.name] = torch.frombuffer(raw, dtype=getattr(torch, target.dtype)).view(target.shape)
        layouts[target.name] = target.layout
    assert resolved.spec is not None
    return Decoder(resolved.spec, tensors, layouts, torch.float32)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_logits_stay_within_the_recipes_error(
    quantization: str, checkpoint: Path, model: Any, make_request: Any, run_core: Any
) -> None:
    core = EngineCore(load(checkpoint, quantization), num_blocks=33, block_size=4, max_num_seqs=2, max_model_len=64)
    seen = []
    compute = core.runner.decoder.compute_logits
    core.runner.decoder.compute_logits = lambda hidden: seen.append(compute(hidden).clone()) or compute(hidden)
    finished = run_core(core, make_request("r", PROMPT, max_tokens=6))
    assert len(finished["r"].token_ids) == 6
    expected = model.logits(PROMPT)[-1]
    error = float((seen[0][0] - expected).norm() / expected.norm())
    assert error < BOUNDS[quantization]
    assert quantization in ("keep", "f32") or error > BOUNDS[quantization] / 100
    if quantization in ("keep", "f32", "bf16"):
        assert finished["r"].token_ids == model.greedy(PROMPT, 6)
