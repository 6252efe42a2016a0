"""The demo model against recorded reference values: every greedy id, and the last logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.models.decoder import Decoder
from preload.engine.quantization.layouts import dequantize

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(params=["keep", "f32"])
def decoder(request: pytest.FixtureRequest, demo_weights: Any) -> Decoder:
    spec, tensors, layouts = demo_weights
    if request.param == "f32":
        tensors = {name: dequantize(layouts[name], {"weight": tensor}) for name, tensor in tensors.items()}
        layouts = dict.fromkeys(tensors, "dense")
    torch.set_num_threads(1)
    return Decoder(spec, tensors, layouts, torch.float32)


class LogitsKeeper(EngineCore):
    """An engine core that keeps the logits of each step."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, num_blocks=64, max_model_len=512, max_num_seqs=4)
        self.kept: list[dict[str, torch.Tensor]] = []
        sample = self.sampler.sample

        def keep(logits: torch.Tensor, requests: Any) -> Any:
            self.kept.append({r.request_id: row.clone() for r, row in zip(requests, logits, strict=True)})
            return sample(logits, requests)

        self.sampler.sample = keep  # type: ignore[method-assign]


@pytest.mark.timeout(1200)  # the torch reference dequantizes every weight in every step
def test_greedy_ids_and_last_logits_equal_the_reference(decoder: Decoder, make_request: Any, run_core: Any) -> None:
    cases = json.loads((DATA / "smollm2-greedy.json").read_text())["cases"]
    logits = np.load(DATA / "smollm2-last-logits.npz")
    core = LogitsKeeper(decoder)
    got = run_core(core, *(make_request(c["name"], c["prompt_ids"], max_tokens=32) for c in cases))
    assert {c["name"]: got[c["name"]].token_ids for c in cases} == {c["name"]: c["greedy_ids"] for c in cases}
    for case in cases:
        first = next(step[case["name"]] for step in core.kept if case["name"] in step).numpy()
        expected = logits[case["name"]]
        assert np.linalg.norm(first - expected) / np.linalg.norm(expected) < 1e-3
