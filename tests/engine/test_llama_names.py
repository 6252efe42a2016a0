"""Names and shapes of the Llama family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preload.engine.models.configs import spec_from_config
from preload.engine.models.llama_names import canonical_name, expected_tensors, is_ignorable, stored_row


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_expected_tensors_are_the_parameters_of_transformers_model(
    tiny_config: dict[str, Any], bias: bool, tied: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {**tiny_config, "attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied, "head_dim": 8}
    model = LlamaForCausalLM(LlamaConfig(**config))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ours = expected_tensors(spec_from_config(config, "config.json"))
    assert {name: tensor.shape for name, tensor in ours.items()} == theirs


def test_every_tensor_of_the_demo_model_has_a_canonical_name(demo_model: Any) -> None:
    import gguf

    names = [canonical_name(tensor.name) for tensor in gguf.GGUFReader(str(demo_model)).tensors]
    assert all(name.startswith("model.") for name in names)
    assert len(set(names)) == len(names)
    assert "model.layers.29.self_attn.o_proj.weight" in names


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.00.attn_q.weight", "blk.x.attn_q.weight", "foo"])
def test_an_unknown_gguf_name_stays_as_it_is(name: str) -> None:
    assert canonical_name(name) == name


def test_rows_are_permuted_as_the_converter_permutes_them() -> None:
    num_heads, head_dim = 3, 8
    rows = np.arange(num_heads * head_dim)
    stored = rows.reshape(num_heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
    assert [stored[stored_row(row, head_dim)] for row in rows] == list(rows)


def test_only_computed_buffers_are_ignorable() -> None:
    assert is_ignorable("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_ignorable("model.layers.0.self_attn.q_proj.weight")
