"""A decoder on Triton's operations equals the same decoder on torch's, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preload.engine.errors import ManifestError
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.layers.linear import Linear
from preload.engine.layers.ops import Experts, Norm, Ops, TorchOps
from preload.engine.layers.triton_ops import TritonOps
from preload.engine.layers.weights import Weight
from preload.engine.models.decoder import Decoder
from preload.engine.models.spec import ModelSpec
from preload.engine.quantization import (
    fp8_per_block,
    fp8_per_tensor,
    int4_group32,
    int8_per_channel,
    mxfp4,
    mxfp8,
    nvfp4,
)

FORMATS = {m.LAYOUT: m for m in (int8_per_channel, int4_group32, fp8_per_tensor, fp8_per_block, mxfp8, mxfp4, nvfp4)}
SPEC = ModelSpec(
    family="llama", vocab_size=97, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=False, attention_bias=True,
)  # fmt: skip
BLOCK_SIZE, NUM_BLOCKS = 4, 33
CPU = torch.device("cpu")


EXPERTS = replace(SPEC, family="mixtral", num_experts=5, num_experts_per_token=2)


def make_tensors(
    layout: str, dtype: torch.dtype, spec: ModelSpec = SPEC, stored: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """`stored`: of dense matrices, by default as all else that is dense."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, heads, kv = SPEC.hidden_size, SPEC.intermediate_size, 64, 32
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (SPEC.vocab_size, hidden),
        "lm_head.weight": (SPEC.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(SPEC.num_layers):
        prefix = f"model.layers.{i}."
        for name, size in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, heads)
        shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
        if spec.num_experts:
            shapes[f"{prefix}block_sparse_moe.gate.weight"] = (spec.num_experts, hidden)
            for name, size in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner))):
                rows = spec.num_experts * size[0]
                shapes[f"{prefix}block_sparse_moe.experts.{name}.weight"] = (rows, size[1])
        else:
            shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    tensors, layouts = {}, {}
    for name, shape in shapes.items():
        dense = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 1.0)
        parts = {"weight": dense.to(stored if stored and len(shape) == 2 else dtype)}
        if len(shape) == 2 and layout != "dense":
            parts = FORMATS[layout].quantize(dense)
        for part, tensor in parts.items():
            key = name if part == "weight" else f"{name}_{part}"
            tensors[key], layouts[key] = tensor, layout if len(shape) == 2 else "dense"
    return tensors, layouts


def run(
    layout: str, dtype: torch.dtype, ops: Ops, spec: ModelSpec = SPEC, stored: torch.dtype | None = None
) -> torch.Tensor:
    """Logits of two prefills, then of two decodes beside another prefill."""
    decoder = Decoder(spec, *make_tensors(layout, dtype, spec, stored), dtype, ops)
    shape = (NUM_BLOCKS, BLOCK_SIZE, SPEC.num_kv_heads, SPEC.head_dim)
    caches = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(SPEC.num_layers)]
    table = torch.tensor([[5, 9, 2, 0], [7, 1, 0, 0], [3, 8, 0, 0]], dtype=torch.int32)
    logits = []
    for steps in ([(0, 0, 9), (1, 0, 3)], [(0, 9, 1), (1, 3, 1), (2, 0, 6)]):
        rows, contexts, counts = zip(*steps, strict=True)
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, counts, strict=True)])
        owners = torch.tensor(rows).repeat_interleave(torch.tensor(counts))
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor([c + n for c, n in zip(contexts, counts, strict=True)], dtype=torch.int32),
            block_table=table[list(rows)],
            slot_mapping=table[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            num_decodes=sum(n == 1 for n in counts),
        )
        ids = (positions * 31 + owners * 7) % SPEC.vocab_size
        logits.append(decoder.compute_logits(decoder.forward(ids, positions, caches, batch)))
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("dense", torch.float32), ("dense", torch.bfloat16), *((layout, torch.float32) for layout in FORMATS)],
)
def test_a_decoder_computes_the_same_logits(layout: str, dtype: torch.dtype) -> None:
    expected, got = run(layout, dtype, TorchOps()), run(layout, dtype, TritonOps(CPU, dtype))
    error = float((got - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("dense", torch.float32),
        ("dense", torch.bfloat16),
        ("mxfp4", torch.float32),
        ("fp8_per_tensor", torch.float32),
    ],
)
def test_a_mixture_of_experts_computes_the_same_logits(layout: str, dtype: torch.dtype) -> None:
    expected, got = (run(layout, dtype, ops, EXPERTS) for ops in (TorchOps(), TritonOps(CPU, dtype)))
    error = float((got - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 6e-2)


class NothingAsked(TorchDispatchMode):
    """Refuses what waits for a device to tell how many values there are, which no capture survives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::nonzero":
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("stored", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_experts_of_another_type_than_activations_are_mixed_by_kernels_that_graphs_hold(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    expected = run("dense", dtype, TorchOps(), EXPERTS, stored)
    with NothingAsked():
        got = run("dense", dtype, TritonOps(CPU, dtype), EXPERTS, stored)
        with pytest.raises(RuntimeError, match="capturing"):
            run("dense", dtype, TorchOps(), EXPERTS, stored)
    error = float((got - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 6e-2)


def test_experts_that_no_kernel_mixes_are_refused_by_name() -> None:
    dense = Weight("router", "dense", {"weight": torch.zeros(5, 64)})
    blocks = Weight("experts.down", "gguf.q4_k", {"weight": torch.zeros(5 * 64, 144, dtype=torch.uint8)})
    experts = Experts(Linear(dense), dense, blocks, 2)
    with pytest.raises(ManifestError, match=r"experts\.down is resident as gguf\.q4_k"):
        TritonOps(CPU, torch.float32).mixture(experts, Norm(torch.ones(64), 1e-5))


def test_what_torch_computes_is_said() -> None:
    for layout, stored, note in (
        ("mxfp8", None, ""),
        ("dense", torch.float32, ""),
        ("dense", torch.bfloat16, "; products of dense bfloat16 by torch"),
    ):
        tensors = make_tensors(layout, torch.float32, EXPERTS, stored)
        decoder = Decoder(EXPERTS, *tensors, torch.float32, TritonOps(CPU, torch.float32))
        assert decoder.kernels == f"Triton kernels{note}; keys and values in float32"
