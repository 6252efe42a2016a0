"""Every recipe of the real model, loaded by the daemon's own loader and computed from the mapped segments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preload.engine.client import attach
from preload.engine.recipe import QUANTIZATIONS, Recipe

DATA = Path(__file__).parents[1] / "data"

MAX_RELATIVE_ERROR = {
    "keep": 1e-4, "f32": 1e-4, "bf16": 0.02, "int8_per_channel": 0.08, "int4_group32": 0.2, "fp8_per_tensor": 0.5,
    "fp8_per_block": 0.5, "mxfp8": 0.5, "mxfp4": 1.2, "nvfp4": 1.2,
}  # fmt: skip
"""Of the last logits, by norm, against the checkpoint dequantized to float32. The checkpoint has 4 bits a weight as
it is, so the others quantize what is quantized already, on other grids; and so small a model takes errors of weights
ill. Closer bounds, on a model without such history: tests/engine/test_recipe_logits.py."""


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DATA / "smollm2-greedy.json").read_text())["cases"]
    return found


def relative_errors(attachment: Any, cases: list[dict[str, Any]]) -> list[float]:
    """Of the logits at each prompt's last position."""
    import torch

    from preload.engine.core.core import EngineCore
    from preload.engine.core.request import Request, SamplingParams
    from preload.engine.models.decoder import Decoder
    from preload.engine.models.spec import ModelSpec

    torch.set_num_threads(1)
    recipe = attachment.resolved_recipe
    spec = ModelSpec.from_dict(recipe["spec"])
    decoder = Decoder(spec, attachment.tensors, attachment.layouts, getattr(torch, recipe["compute_dtype"]))
    expected = np.load(DATA / "smollm2-last-logits.npz")
    errors = []
    for case in cases:
        core = EngineCore(decoder, num_blocks=8, max_model_len=64, max_num_seqs=1)
        kept = []
        sample = core.sampler.sample

        def keep(logits: Any, requests: Any, kept: Any = kept, sample: Any = sample) -> Any:
            kept.append(logits[0].float().numpy().copy())
            return sample(logits, requests)

        core.sampler.sample = keep  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=1)
        core.add_request(Request(request_id="r", prompt_ids=case["prompt_ids"], sampling=params))
        while core.has_work:
            core.step()
        wanted = expected[case["name"]]
        errors.append(float(np.linalg.norm(kept[0] - wanted) / np.linalg.norm(wanted)))
    return errors


def test_every_recipe_stays_within_its_error(
    shared_daemon: Any, demo_model: Path, cases: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for name in QUANTIZATIONS:
        generation = shared_daemon.load(demo_model, quantization=name)
        with attach(
            demo_model, recipe=Recipe(quantization=name), runtime_dir=str(shared_daemon.runtime_dir)
        ) as found:
            errors = relative_errors(found, cases)
        rows.append((name, generation.resident_bytes, max(errors)))
    with capsys.disabled():
        print("\nrecipe              resident bytes  relative error of the last logits (worst of three prompts)")
        for name, num_bytes, error in rows:
            print(f"{name:18}  {num_bytes:14,}  {error:.6f}")
    assert {name: error < MAX_RELATIVE_ERROR[name] for name, _, error in rows} == dict.fromkeys(QUANTIZATIONS, True)
    # A recipe that silently did nothing would be as exact as its neighbour.
    assert rows[2][2] != rows[1][2]
    assert rows[4][2] > rows[3][2] > rows[1][2]
    lossy = [error for name, _, error in rows if name not in ("keep", "f32")]
    assert len(set(lossy)) == len(lossy)
    assert min(lossy) > 1e-3 > 1e-5 > max(error for name, _, error in rows if name in ("keep", "f32"))


def test_two_models_and_two_recipes_are_resident_at_once(
    shared_daemon: Any, demo_model: Path, raw_checkpoint: Path
) -> None:
    first = shared_daemon.load(demo_model)
    second = shared_daemon.load(demo_model, quantization="bf16")
    third = shared_daemon.load(raw_checkpoint, model="raw")
    ids = {first.id, second.id, third.id}
    assert len(ids) == 3
    listed = {g.id: g for g in shared_daemon.generations()}
    assert ids <= set(listed)
    assert shared_daemon.device().resident_bytes == sum(g.resident_bytes for g in listed.values())
    with attach(demo_model, runtime_dir=str(shared_daemon.runtime_dir)) as kept:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert kept.generation_id == first.id
        assert kept.layouts[name] == "gguf.q4_1"
        bf16 = Recipe(quantization="bf16")
        with attach(demo_model, recipe=bf16, runtime_dir=str(shared_daemon.runtime_dir)) as cast:
            assert cast.generation_id == second.id
            assert str(cast.tensors[name].dtype) == "torch.bfloat16"
