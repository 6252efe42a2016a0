"""A whole engine core on Triton's operations, in Triton's interpreter, says what one on torch's says.

Its steps go the way they go on a GPU: inputs are copied over, decodes are replayed by graphs (whose recorder computes
them again), tokens are chosen by the sampling kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.core.on_device import DeviceSteps
from preload.engine.core.placement import HostPlacement
from preload.engine.core.request import Request, SamplingParams
from preload.engine.core.sampler import Sampler
from preload.engine.core.speculation.build import speculate
from preload.engine.layers.ops import TorchOps
from preload.engine.layers.triton_ops import TritonOps
from preload.engine.models.decoder import Decoder
from preload.engine.models.spec import ModelSpec
from preload.engine.quantization import int8_per_channel

CPU = torch.device("cpu")
SPEC = ModelSpec(
    family="llama", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


@dataclass
class Graph:
    work: Callable[[], torch.Tensor]
    out: torch.Tensor

    def replay(self) -> None:
        self.out.copy_(self.work())


class Recorder:
    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        graph = Graph(work, work())
        return graph, graph.out


class Placement(HostPlacement):
    """Keys and values lie as on a GPU: a layer's in one piece, as its kernels want them."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


def decoder(ops: Any) -> Decoder:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (61, 32), "model.norm.weight": (32,)}
    for name, size in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
        shapes[f"model.layers.0.self_attn.{name}_proj.weight"] = (size, 32)
    shapes |= {f"model.layers.0.mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
    shapes["model.layers.0.mlp.down_proj.weight"] = (32, 48)
    shapes |= {f"model.layers.0.{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    tensors, layouts = {}, {}
    for name, shape in shapes.items():
        dense = torch.randn(shape, generator=generator) * (0.5 if len(shape) == 2 else 1.0)
        parts = int8_per_channel.quantize(dense) if len(shape) == 2 else {"weight": dense}
        for part, tensor in parts.items():
            key = name if part == "weight" else f"{name}_{part}"
            tensors[key], layouts[key] = tensor, "int8_per_channel" if len(shape) == 2 else "dense"
    return Decoder(SPEC, tensors, layouts, torch.float32, ops)


REQUESTS = {
    "greedy": ([1, 2, 3], {}),
    "long": ([(7 * i) % 61 for i in range(20)], {}),
    "sampled": ([4, 5], {"temperature": 0.9, "seed": 7}),
    "truncated": ([9], {"temperature": 1.2, "seed": 8, "top_p": 0.8, "top_k": 20, "min_p": 0.01}),
    "changed": ([11, 12], {"logit_bias": {5: 3.0}, "logprobs": True, "num_top_logprobs": 2}),
}


def run(core: EngineCore) -> dict[str, list[int]]:
    for name, (prompt, sampling) in REQUESTS.items():
        params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **sampling})
        core.add_request(Request(request_id=name, prompt_ids=prompt, sampling=params))
    tokens: dict[str, list[int]] = {name: [] for name in REQUESTS}
    while core.has_work:
        for output in core.step():
            assert not output.error, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


def test_a_core_says_the_same_by_kernels_graphs_and_sampling_of_a_gpu() -> None:
    settings = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 5, "token_budget": 16, "max_model_len": 48}
    expected = run(EngineCore(decoder(TorchOps()), **settings))
    model = decoder(TritonOps(CPU, torch.float32))
    steps = DeviceSteps(model, CPU, max_num_seqs=5, max_num_blocks=12, recorder=Recorder())
    core = EngineCore(model, **settings, placement=Placement(), on_device=steps)
    core.use_graphs()
    while core.num_missing_graphs:
        core.capture_graph()
    assert run(core) == expected
    assert all(len(tokens) == 5 for tokens in expected.values())
    assert steps.graphs is not None
    assert steps.graphs.num_replayed > 0 < steps.graphs.num_eager


def test_drafts_are_verified_by_a_gpus_kernels_and_graphs() -> None:
    settings = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 5, "token_budget": 20, "max_model_len": 48}
    expected = run(EngineCore(decoder(TorchOps()), **settings))
    model = decoder(TritonOps(CPU, torch.float32))
    steps = DeviceSteps(model, CPU, max_num_seqs=5, max_num_blocks=12, num_draft_tokens=3, recorder=Recorder())
    core = EngineCore(model, **settings, placement=Placement(), on_device=steps)
    speculator = speculate(
        core, "draft", num_draft_tokens=3, draft=decoder(TritonOps(CPU, torch.float32)), adaptive=False
    )
    core.use_graphs()
    while core.num_missing_graphs:
        core.capture_graph()
    assert run(core) == expected
    assert speculator.acceptance.num_accepted == speculator.acceptance.num_drafted, "the draft model is the model"
    assert sum(speculator.acceptance.num_accepted) > 5
    for graphs in (steps.graphs, speculator.drafter.graphs):
        assert graphs is not None
        assert graphs.num_replayed > 0
    assert {key for key in steps.graphs.keys if key[0] > key[1]} == {(4, 1), (8, 2), (16, 4), (20, 5)}


@pytest.mark.parametrize("truncated", [False, True])
def test_tokens_are_those_that_the_sampler_would_choose(truncated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator) * 3
    rows, positions = torch.arange(40), torch.arange(40) + 3
    results = []
    for choose in (None, TritonOps(CPU, torch.float32).choose):
        sampler = Sampler(40, 300, choose=choose)
        for row in range(40):
            extra = {"top_k": row % 7, "top_p": 0.5 + row / 80, "min_p": row % 3 / 50} if truncated else {}
            params = SamplingParams(temperature=row % 4 / 2, seed=row, **extra)
            request = Request(request_id=str(row), prompt_ids=[1], sampling=params)
            request.row = row
            sampler.add(row, request)
        results.append(sampler.choose_ids(logits, rows, positions).tolist())
    assert results[0] == results[1]
    assert results[0] != logits.argmax(dim=1).tolist()
