"""The demo model on native kernels: the recorded greedy ids, and the same bits alone or in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.layers.native_ops import native_ops
from preload.engine.models.decoder import Decoder
from preload.engine.quantization import int4_group32, int8_per_channel
from preload.engine.quantization.layouts import dequantize

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2-greedy.json").read_text())["cases"]


def make_core(decoder: Decoder) -> tuple[EngineCore, dict[str, list[torch.Tensor]]]:
    """A core, and the logits of each request's tokens as they come."""
    core = EngineCore(decoder, num_blocks=64, max_model_len=512, max_num_seqs=4)
    kept: dict[str, list[torch.Tensor]] = {}
    sample = core.sampler.sample

    def keep(logits: torch.Tensor, requests: Any) -> Any:
        for request, row in zip(requests, logits, strict=True):
            kept.setdefault(request.request_id, []).append(row.clone())
        return sample(logits, requests)

    core.sampler.sample = keep  # type: ignore[method-assign]
    return core, kept


@pytest.mark.parametrize("variant", ["native", "without AMX", "without AVX-512"])
def test_greedy_ids_and_logits_are_the_reference_and_depend_on_no_batch(
    open_library: Any, demo_weights: Any, make_request: Any, run_core: Any, variant: str
) -> None:
    spec, tensors, layouts = demo_weights
    decoder = Decoder(spec, tensors, layouts, torch.float32, native_ops(open_library(variant, 2), torch.float32))
    requests = {c["name"]: make_request(c["name"], c["prompt_ids"], max_tokens=32) for c in CASES}
    core, kept = make_core(decoder)
    got = run_core(core, *requests.values())
    logits = np.load(DATA / "smollm2-last-logits.npz")
    for case in CASES:
        name = case["name"]
        assert got[name].token_ids == case["greedy_ids"]
        first = kept[name][0].numpy()
        assert np.linalg.norm(first - logits[name]) / np.linalg.norm(logits[name]) < 1e-3
        alone, kept_alone = make_core(decoder)
        run_core(alone, make_request(name, case["prompt_ids"], max_tokens=32))
        assert all(map(torch.equal, kept_alone[name], kept[name]))


@pytest.mark.parametrize("recipe", ["int8_per_channel", "int4_group32", "bf16"])
def test_quantized_recipes_equal_torch_on_the_same_weights(
    open_library: Any, demo_weights: Any, make_request: Any, run_core: Any, recipe: str
) -> None:
    """Two layers of the demo model, quantized anew: native and torch give the same last logits."""
    spec, tensors, layouts = demo_weights
    spec = type(spec).from_dict({**spec.to_dict(), "num_layers": 2})
    quantize = {"int8_per_channel": int8_per_channel.quantize, "int4_group32": int4_group32.quantize}
    made, tags = {}, {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= 2:
            continue
        if layouts[name] == "dense":
            made[name], tags[name] = tensor, "dense"
            continue
        dense = dequantize(layouts[name], {"weight": tensor})
        parts = {"weight": dense.bfloat16()} if recipe == "bf16" else quantize[recipe](dense)
        for part, value in parts.items():
            key = name if part == "weight" else f"{name}_{part}"
            made[key], tags[key] = value, "dense" if recipe == "bf16" else recipe
    last = []
    for ops in (None, native_ops(open_library("native", 2), torch.float32)):
        core, kept = make_core(Decoder(spec, made, tags, torch.float32, ops))
        run_core(core, make_request("a", CASES[0]["prompt_ids"], max_tokens=1))
        last.append(kept["a"][0])
    assert float((last[1] - last[0]).norm() / last[0].norm()) < 1e-5
