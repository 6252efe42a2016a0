"""Speculation where weights, keys and values are on a GPU: what has to be moved is moved, and answers are the host's.

The GPU is one of the host's own, strict about where tensors are: tests/fakes/strict_device.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.core.on_device import DeviceSteps
from preload.engine.core.placement import HostPlacement
from preload.engine.core.request import Request
from preload.engine.core.speculation.build import speculate
from preload.engine.models.decoder import Decoder

SAMPLED = {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 30}


class DevicePlacement(HostPlacement):
    """Keys and values on a device; `shapes`: of all that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shapes: list[Sequence[int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.shapes.append(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


def on(device: torch.device, decoder: Decoder, tensors: dict[str, torch.Tensor]) -> Decoder:
    """The same model, its weights on a device."""
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Decoder(decoder.spec, moved, dict.fromkeys(moved, "dense"), decoder.dtype)


SETTINGS: dict[str, Any] = {
    "num_blocks": 65, "block_size": 4, "max_num_seqs": 6, "token_budget": 32, "max_model_len": 64,
}  # fmt: skip


def device_core(device: torch.device, decoder: Decoder, num_drafts: int, recorder: Any, **changes: Any) -> EngineCore:
    settings = {**SETTINGS, **changes}
    steps = DeviceSteps(
        decoder, device, max_num_seqs=settings["max_num_seqs"],
        max_num_blocks=-(-settings["max_model_len"] // settings["block_size"]), num_draft_tokens=num_drafts,
        recorder=recorder,
    )  # fmt: skip
    return EngineCore(decoder, **settings, placement=DevicePlacement(device), on_device=steps)


def asked(make_request: Any, **sampling: Any) -> list[Request]:
    phrases = [[5, 6, 7, 8], [9, 10, 11], [1, 2, 3, 4, 5], [60], [70, 71] * 3]
    return [
        make_request(str(i), (p * 4)[: 5 + 3 * i], **{"max_tokens": 16, **sampling}) for i, p in enumerate(phrases)
    ]


@pytest.fixture
def models(tiny: Any, tiny_model: Any, gpu_of_the_host: torch.device) -> dict[str, Decoder]:
    """The tiny model and a disturbed one, both on the device."""
    generator = torch.Generator().manual_seed(0)
    other = {n: t * (1 + 0.03 * torch.randn(t.shape, generator=generator)) for n, t in tiny.tensors.items()}
    return {
        "target": on(gpu_of_the_host, tiny.decoder(), tiny.tensors),
        "draft": on(gpu_of_the_host, tiny.decoder(), other),
    }


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {**SAMPLED, "logprobs": True, "num_top_logprobs": 2}],
                         ids=["greedy", "sampled", "logprobs"])  # fmt: skip
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_speculating_on_a_device_answers_as_the_host_without(
    tiny: Any, models: dict[str, Decoder], make_core: Any, make_request: Any, run_core: Any,
    gpu_of_the_host: torch.device, recorder: Any, method: str, sampling: dict[str, Any], with_graphs: bool,
) -> None:  # fmt: skip
    plain = run_core(make_core(tiny), *asked(make_request, **sampling))
    core = device_core(gpu_of_the_host, models["target"], 3, recorder)
    draft = models["draft"] if method == "draft" else None
    speculator = speculate(core, method, num_draft_tokens=3, draft=draft, adaptive=False)
    if with_graphs:
        core.use_graphs()
        while core.num_missing_graphs:
            core.capture_graph()
    core.warm_up(4)
    got = run_core(core, *asked(make_request, **sampling))
    assert {n: e.token_ids for n, e in got.items()} == {n: e.token_ids for n, e in plain.items()}
    steps, batch = core.runner.on_device, core.runner.batch
    assert steps is not None
    assert steps.table is not None
    steps.block_table(batch.take_block_writes(), torch.tensor([0]), 1)
    batch.apply()
    assert steps.table.tolist() == batch.block_table.tolist(), "the device's copy of the block table is the host's"
    if method == "draft" or not sampling:  # what a random model samples does not repeat itself
        assert sum(speculator.acceptance.num_drafted) > (30 if method == "draft" else 3)
    graphs = [steps.graphs for steps in (core.runner.on_device, speculator.drafter) if steps.graphs]
    if with_graphs:
        assert len(graphs) == (2 if method == "draft" else 1)
        assert all(part.num_replayed > part.num_eager for part in graphs)
    else:
        assert not graphs


@pytest.mark.parametrize("verification", ["sampled", "block"])
def test_rules_of_the_literature_draw_the_same_on_a_device(
    tiny: Any, tiny_model: Any, models: dict[str, Decoder], make_core: Any, make_request: Any, run_core: Any,
    gpu_of_the_host: torch.device, recorder: Any, verification: str,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    other = {n: t * (1 + 0.03 * torch.randn(t.shape, generator=generator)) for n, t in tiny.tensors.items()}
    answers = []
    for core, draft in (
        (make_core(tiny, **SETTINGS), Decoder(tiny.spec, other, tiny.layouts, torch.float32)),
        (device_core(gpu_of_the_host, models["target"], 3, recorder), models["draft"]),
    ):
        speculate(core, "draft", num_draft_tokens=3, draft=draft, verification=verification, adaptive=False)
        got = run_core(core, *asked(make_request, **SAMPLED))
        answers.append({name: entry.token_ids for name, entry in got.items()})
    assert answers[0] == answers[1]


def test_a_drafters_keys_and_values_are_where_the_models_are(
    models: dict[str, Decoder], gpu_of_the_host: torch.device, recorder: Any
) -> None:
    core = device_core(gpu_of_the_host, models["target"], 3, recorder)
    speculate(core, "draft", num_draft_tokens=3, draft=models["draft"])
    core.use_graphs()
    assert core.num_missing_graphs > 0
    core.allocate_kv(33)
    assert core.num_missing_graphs == 0, "graphs of the storage that is gone are gone, too"
    placement = core.placement
    assert isinstance(placement, DevicePlacement)
    assert [shape[2] for shape in placement.shapes] == [65, 2, 65, 33, 33]
    assert core.kv_cache_bytes == 2 * core.cache.num_bytes
