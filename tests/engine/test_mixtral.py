"""A mixture of experts from checkpoint to text: Mixtral, against transformers with random weights.

Experts are stored one by one and resident as two weights a layer; what is compared goes through the loader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from preload.engine.core.core import EngineCore
from preload.engine.core.kv_cache import KVCache
from preload.engine.errors import CheckpointError, RequestError
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.native.build import KernelsUnavailableError, find_or_build
from preload.engine.kernels.native.library import NativeLibrary
from preload.engine.layers.native_ops import native_ops
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.models.configs import spec_from_config
from preload.engine.models.decoder import Decoder
from preload.engine.models.spec import ModelSpec
from preload.engine.quantization import dequantize_rows
from preload.engine.recipe import Recipe

EXPERTS, HIDDEN, INNER = 4, 32, 64


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(4)
    config = MixtralConfig(
        vocab_size=97, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, num_local_experts=EXPERTS,
        num_experts_per_tok=2, tie_word_embeddings=False, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtral") / "checkpoint"
    oracle.save_pretrained(path)
    return path


@pytest.fixture
def resident(daemon: Any, folder: Path) -> Any:
    """A function: the spec, tensors and layouts of a recipe, as an engine attaches to them."""
    from preload.engine.client import attach

    attachments = []

    def load(quantization: str) -> tuple[ModelSpec, dict[str, torch.Tensor], dict[str, str]]:
        with daemon.control() as control:
            *_, last = control.load(folder, Recipe(quantization=quantization), timeout_s=120)
        found = attach(generation_id=last.loaded.id, runtime_dir=str(daemon.runtime_dir))
        attachments.append(found)
        return ModelSpec.from_dict(found.resolved_recipe["spec"]), dict(found.tensors), dict(found.layouts)

    yield load
    for attachment in attachments:
        attachment.close()


def logits_of(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Of a prompt, with its last token decoded alone."""
    cache = KVCache(decoder.spec, 5, 16, decoder.dtype)
    table = torch.arange(1, 5, dtype=torch.int32)[None]
    parts = []
    for first, end in ((0, len(ids) - 1), (len(ids) - 1, len(ids))):
        positions = torch.arange(first, end)
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32), block_table=table,
            slot_mapping=table[0, positions // 16].long() * 16 + positions % 16, num_decodes=int(end - first == 1),
        )  # fmt: skip
        hidden = decoder.forward(torch.tensor(ids[first:end]), positions, cache.layers, batch)
        parts.append(decoder.compute_logits(hidden))
    return torch.cat(parts)


def wanted(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    return found


IDS = [(7 * i + 3) % 97 for i in range(40)]


def test_logits_are_those_of_transformers(oracle: Any, resident: Any) -> None:
    spec, tensors, layouts = resident("keep")
    assert (spec.family, spec.num_experts, spec.num_experts_per_token) == ("mixtral", EXPERTS, 2)
    stacked = tensors["model.layers.1.block_sparse_moe.experts.gate_up.weight"]
    assert torch.equal(stacked.view(EXPERTS, 2 * INNER, HIDDEN), oracle.model.layers[1].mlp.experts.gate_up_proj.data)
    decoder = Decoder(spec, tensors, layouts, torch.float32)
    torch.testing.assert_close(logits_of(decoder, IDS), wanted(oracle, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "quantization", ["bf16", "int8_per_channel", "int4_group32", "fp8_per_tensor", "mxfp4", "nvfp4"]
)
def test_logits_are_those_of_the_numbers_that_are_resident(oracle: Any, resident: Any, quantization: str) -> None:
    """transformers computes with what the resident parts mean; its own weights are restored afterwards."""
    spec, tensors, layouts = resident(quantization)
    decoder = Decoder(spec, tensors, layouts, torch.float32)
    assert layouts["model.layers.0.block_sparse_moe.gate.weight"] == "dense", "the router is not quantized"
    before = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    names = {
        name: name.replace("mlp.experts.gate_up_proj", "block_sparse_moe.experts.gate_up.weight") for name in before
    }
    for name, theirs in names.items():
        ours = theirs.replace("mlp.experts.down_proj", "block_sparse_moe.experts.down.weight")
        names[name] = ours.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")
    meant = {}
    for name, ours in names.items():
        layout, companions = layouts.get(ours, "dense"), ("scale", "min", "global_scale")
        parts = {
            "weight": tensors[ours],
            **{c: tensors[f"{ours}_{c}"] for c in companions if f"{ours}_{c}" in tensors},
        }
        whole = parts["weight"].float() if parts["weight"].dim() == 1 else dequantize_rows(layout, parts, slice(None))
        meant[name] = whole.view(before[name].shape)
    oracle.load_state_dict(meant)
    try:
        expected = wanted(oracle, IDS)
    finally:
        oracle.load_state_dict(before)
    torch.testing.assert_close(logits_of(decoder, IDS), expected, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(expected, wanted(oracle, IDS), atol=1e-3), "the recipe changes something"


@pytest.mark.parametrize("quantization", ["keep", "bf16", "int8_per_channel", "int4_group32", "mxfp4"])
def test_native_products_mix_as_torch_does(
    resident: Any, quantization: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        library = NativeLibrary(find_or_build(tmp_path_factory.getbasetemp() / "mixtral-kernels"), 1)
    except KernelsUnavailableError as error:
        pytest.skip(error.message)
    spec, tensors, layouts = resident(quantization)
    decoder = Decoder(spec, tensors, layouts, torch.float32, native_ops(library, torch.float32))
    expected = logits_of(Decoder(spec, tensors, layouts, torch.float32), IDS)
    got = logits_of(decoder, IDS)
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 1e-4
    assert torch.equal(logits_of(decoder, IDS[:20])[:19], got[:19]), "a token's bits do not depend on its neighbours"


def test_a_core_says_what_transformers_says(oracle: Any, resident: Any, make_request: Any, run_core: Any) -> None:
    spec, tensors, layouts = resident("keep")
    decoder = Decoder(spec, tensors, layouts, torch.float32)
    core = EngineCore(decoder, num_blocks=65, block_size=4, max_num_seqs=4, token_budget=16, max_model_len=64)
    core.warm_up(4)
    prompts = {"a": [1, 2, 3], "b": list(range(20, 45)), "c": [9]}
    got = run_core(core, *(make_request(name, prompt, max_tokens=10) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(wanted(oracle, ids)[-1].argmax()))
        assert got[name].token_ids == ids[len(prompt) :]


def test_the_loader_refuses_what_does_not_stack(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"

    def save(where: str, tensors: dict[str, torch.Tensor], **changes: Any) -> str:
        path = tmp_path / where
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(tensors, path / "model.safetensors")
        return str(path)

    missing = save("missing", {n: t for n, t in stored.items() if n != name})
    with pytest.raises(CheckpointError, match=rf"{name}.*missing"):
        open_and_resolve(missing, Recipe())
    mixed = save("mixed", {**stored, name: stored[name].bfloat16()})
    with pytest.raises(CheckpointError, match=rf"{name}.*is stored as bfloat16, but .*experts\.0\.w1"):
        open_and_resolve(mixed, Recipe())
    with pytest.raises(CheckpointError, match=r"has 64 rows, not a multiple of fp8_per_block's 128"):
        open_and_resolve(str(folder), Recipe(quantization="fp8_per_block"))
    fewer = save("fewer", stored, num_local_experts=3)
    with pytest.raises(CheckpointError, match=r"experts\.3\.w1\.weight.*is unexpected"):
        open_and_resolve(fewer, Recipe())
    many = save("many", stored, num_local_experts=1 << 30)
    with pytest.raises(CheckpointError, match=r"num_local_experts=1073741824, but .* holds only"):
        open_and_resolve(many, Recipe())
    with pytest.raises(RequestError, match=r"model .llama.*mixtral"):
        open_and_resolve(str(folder), Recipe(model="llama"))


def test_configurations_that_no_mixture_has_are_refused(folder: Path, tiny: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for changes, words in (
        ({"num_experts_per_tok": 5}, "is more than num_local_experts=4"),
        ({"num_nextn_predict_layers": 1}, "not supported beside a mixture"),
        ({"mlp_bias": True}, "not supported beside a mixture"),
        ({"architectures": ["LlamaForCausalLM"]}, "num_local_experts=4 is not supported"),
    ):
        with pytest.raises(CheckpointError, match=words):
            spec_from_config({**config, **changes}, "config.json")
    assert not {"num_experts", "num_experts_per_token"} & set(tiny.spec.to_dict()), "identities of others stay"
    spec = spec_from_config(config, "config.json")
    assert ModelSpec.from_dict(spec.to_dict()) == spec
