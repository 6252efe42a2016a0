"""The multi-token-prediction head against a reference in plain torch, and drafts by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from preload.engine.core.placement import HostPlacement
from preload.engine.core.speculation.build import speculate
from preload.engine.errors import CheckpointError, RequestError
from preload.engine.models.configs import spec_from_config
from preload.engine.models.decoder import Decoder

HIDDEN = 32


class HeadedModel:
    """A tiny Llama with a head: transformers' layers, put together as the paper says."""

    def __init__(self, tiny_model: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

        self.tiny = tiny_model()
        torch.manual_seed(8)
        config = self.tiny.oracle.config
        self.layer = LlamaDecoderLayer(config, 0).eval()
        self.norms = {name: LlamaRMSNorm(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
        self.projection = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        parts = {f"{name}.weight": norm.weight for name, norm in self.norms.items()}
        parts |= {"eh_proj.weight": self.projection.weight, **dict(self.layer.named_parameters())}
        for parameter in parts.values():
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
        prefix = f"model.layers.{config.num_hidden_layers}"
        self.tensors = {f"{prefix}.{name}": parameter.detach() for name, parameter in parts.items()}

    def decoder(self) -> Decoder:
        tensors = {**self.tiny.tensors, **self.tensors}
        spec = replace(self.tiny.spec, num_mtp_layers=1)
        return Decoder(spec, tensors, dict.fromkeys(tensors, "dense"), torch.float32)

    def save(self, folder: Path) -> None:
        """As a checkpoint."""
        self.tiny.oracle.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
        stored = load_file(folder / "model.safetensors")
        save_file({**stored, **{n: t.contiguous() for n, t in self.tensors.items()}}, folder / "model.safetensors")

    @torch.no_grad()
    def guess(self, token_ids: list[int], count: int) -> list[int]:
        """What the head guesses after `token_ids`; computed anew from the first token on."""
        model = self.tiny.oracle.model
        states = model(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state
        following, drafts = list(token_ids[1:]), []
        for _ in range(count):
            out = self._head(model, torch.tensor([following]), states)
            drafts.append(int(self.tiny.oracle.lm_head(out[0, -1]).argmax()))
            states = torch.cat((states, out[:, -1:]), dim=1)
            following.append(drafts[-1])
        return drafts

    def _head(self, model: Any, token_ids: Tensor, states: Tensor) -> Tensor:
        tokens = self.norms["enorm"](model.embed_tokens(token_ids))
        x = self.projection(torch.cat((tokens, self.norms["hnorm"](states)), dim=-1))
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        out = self.layer(x, attention_mask=mask, position_embeddings=model.rotary_emb(x, positions))
        return self.norms["shared_head.norm"](out[0] if isinstance(out, tuple) else out)


@pytest.fixture(scope="module")
def headed(tiny_model: Any) -> HeadedModel:
    return HeadedModel(tiny_model)


class _Core:
    """Just what make_core asks of a model."""

    def __init__(self, headed: HeadedModel) -> None:
        self.decoder = headed.decoder


class _Placement(HostPlacement):
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_what_the_reference_guesses(
    headed: HeadedModel, make_core: Any, make_request: Any, count: int
) -> None:
    core = make_core(_Core(headed), num_blocks=200, token_budget=8)
    speculate(core, "mtp", num_draft_tokens=count, adaptive=False)
    prompts = {"a": [5, 6, 7], "b": list(range(40, 61)), "c": [9]}
    asked = [make_request(name, prompt, max_tokens=12) for name, prompt in prompts.items()]
    for request in asked:
        core.add_request(request)
    num_compared = 0
    while core.has_work:
        core.step()
        for request in asked:
            if request.draft_ids:
                assert request.draft_ids == headed.guess(request.token_ids(), len(request.draft_ids))
                num_compared += len(request.draft_ids)
    assert num_compared > 20


@pytest.mark.parametrize("num_blocks", [200, 18])
def test_answers_with_a_head_are_those_without(
    headed: HeadedModel, make_core: Any, make_request: Any, run_core: Any, num_blocks: int
) -> None:
    core = make_core(_Core(headed), num_blocks=num_blocks)
    speculator = speculate(core, "mtp", num_draft_tokens=2, adaptive=False)
    prompts = {str(i): [i, 50, 51, i, 52] * 3 for i in range(6)}
    got = run_core(core, *(make_request(name, prompt, max_tokens=20) for name, prompt in prompts.items()))
    assert {name: got[name].token_ids for name in prompts} == {
        name: headed.tiny.greedy(prompt, 20) for name, prompt in prompts.items()
    }
    assert speculator.acceptance.num_drafted[1] > 20
    assert core.kv_cache_bytes == core.cache.num_bytes * 3 // 2  # one layer beside two


def test_a_head_on_a_device_drafts_and_answers_as_on_the_host(
    headed: HeadedModel, make_core: Any, make_request: Any, run_core: Any, gpu_of_the_host: torch.device
) -> None:
    from preload.engine.core.core import EngineCore
    from preload.engine.core.on_device import DeviceSteps

    def ask() -> list[Any]:
        return [make_request(str(i), [i, 50, 51, i, 52] * 3, max_tokens=20) for i in range(4)]

    here = make_core(_Core(headed), num_blocks=200)
    on_host = speculate(here, "mtp", num_draft_tokens=2, adaptive=False)
    expected = run_core(here, *ask())
    model = headed.decoder()
    moved = {n: t.to(gpu_of_the_host) for n, t in {**headed.tiny.tensors, **headed.tensors}.items()}
    model = Decoder(model.spec, moved, dict.fromkeys(moved, "dense"), torch.float32)
    steps = DeviceSteps(model, gpu_of_the_host, max_num_seqs=8, max_num_blocks=16, num_draft_tokens=2)
    there = EngineCore(
        model, num_blocks=200, block_size=4, max_num_seqs=8, token_budget=32, max_model_len=64, on_device=steps,
        placement=_Placement(gpu_of_the_host),
    )  # fmt: skip
    on_device = speculate(there, "mtp", num_draft_tokens=2, adaptive=False)
    there.warm_up(4)
    got = run_core(there, *ask())
    assert {name: got[name].token_ids for name in got} == {name: expected[name].token_ids for name in got}
    assert on_device.acceptance == on_host.acceptance
    assert on_device.acceptance.num_drafted[1] > 20


def test_a_checkpoint_with_a_head_is_loaded_and_attached(headed: HeadedModel, daemon: Any, tmp_path: Path) -> None:
    from preload.engine.client import attach
    from preload.engine.models.spec import ModelSpec

    folder = tmp_path / "headed"
    headed.save(folder)
    generation = daemon.load(folder)
    with attach(generation_id=generation.id, runtime_dir=str(daemon.runtime_dir)) as attachment:
        spec = ModelSpec.from_dict(attachment.resolved_recipe["spec"])
        assert spec.num_mtp_layers == 1
        decoder = Decoder(spec, attachment.tensors, attachment.layouts, torch.float32)
        assert decoder.mtp is not None
        for name, tensor in headed.tensors.items():
            assert torch.equal(attachment.tensors[name], tensor)


def test_a_model_without_a_head_is_refused(tiny: Any, make_core: Any) -> None:
    with pytest.raises(RequestError, match="no multi-token-prediction head"):
        speculate(make_core(tiny), "mtp")


def test_identities_of_models_without_a_head_stay(tiny: Any) -> None:
    assert "num_mtp_layers" not in tiny.spec.to_dict()
    assert replace(tiny.spec, num_mtp_layers=1).to_dict()["num_mtp_layers"] == 1


@pytest.mark.parametrize("value", [2, -1, "one", True])
def test_other_numbers_of_heads_are_refused(tiny: Any, value: object) -> None:
    config = {**tiny.oracle.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    assert spec_from_config({**config, "num_nextn_predict_layers": 0}, "config.json").num_mtp_layers == 0
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        spec_from_config({**config, "num_nextn_predict_layers": value}, "config.json")
