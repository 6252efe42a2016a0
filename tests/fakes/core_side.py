"""Fixtures of the engine core's tests: tiny random models with transformers as the oracle, and the demo model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.core.request import Request, RequestOutput, SamplingParams
from preload.engine.models.decoder import Decoder
from preload.engine.models.spec import ModelSpec, RopeSpec


@dataclass
class TinyModel:
    """A random Llama of transformers, and the same weights as this engine reads them."""

    oracle: Any
    spec: ModelSpec
    tensors: dict[str, torch.Tensor]
    layouts: dict[str, str]

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        return Decoder(self.spec, self.tensors, self.layouts, dtype)

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """What transformers generates, without a KV cache."""
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.oracle(torch.tensor([ids]), use_cache=False).logits[0]
        return logits


def make_tiny_model(rope: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> TinyModel:
    """`rope`: Hugging Face's rope_parameters; `changes`: LlamaConfig's fields."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})}
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = LlamaConfig(**{**sizes, **changes}, rope_parameters=dict(rope), initializer_range=0.3)
    oracle = LlamaForCausalLM(config).eval()
    for parameter in oracle.parameters():
        if parameter.dim() == 1:  # transformers starts norms at 1 and biases at 0, which hides mistakes
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    tensors = {n: t.detach().clone() for n, t in oracle.state_dict().items() if "rotary" not in n}
    kind = rope["rope_type"]
    spec = ModelSpec(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        rope=RopeSpec(
            theta=rope["rope_theta"],
            scaling="none" if kind == "default" else kind,
            parameters={k: v for k, v in rope.items() if k not in ("rope_type", "rope_theta")},
        ),
    )
    return TinyModel(oracle, spec, tensors, dict.fromkeys(tensors, "dense"))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., TinyModel]:
    return make_tiny_model


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    """One tiny model for tests that do not care which."""
    return make_tiny_model()


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class CheckedCore(EngineCore):
    """A core that checks its bookkeeping after every step."""

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        self.check_invariants()
        return outputs


def make_core(model: TinyModel, **changes: Any) -> EngineCore:
    settings = {
        "num_blocks": 65, "block_size": 4, "max_num_seqs": 8, "token_budget": 32, "max_model_len": 64,
    }  # fmt: skip
    return CheckedCore(model.decoder(), **{**settings, **changes})


def make_request(request_id: str, prompt_ids: list[int], **sampling: Any) -> Request:
    """A request whose keyword arguments are sampling parameters; `output_ids` and `priority` are its own."""
    own = {k: sampling.pop(k) for k in ("output_ids", "priority") if k in sampling}
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return Request(request_id=request_id, prompt_ids=list(prompt_ids), sampling=params, **own)


@dataclass
class Finished:
    """All outputs of one request, joined."""

    token_ids: list[int]
    outputs: list[RequestOutput]

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


def run_core(core: EngineCore, *requests: Request, max_steps: int = 2000) -> dict[str, Finished]:
    """Adds the requests and steps until the core has nothing left."""
    for request in requests:
        core.add_request(request)
    finished: dict[str, Finished] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return finished
        for output in core.step():
            entry = finished.setdefault(output.request_id, Finished([], []))
            entry.token_ids += output.token_ids
            entry.outputs.append(output)
    raise AssertionError(f"requests are still running after {max_steps} steps")


@pytest.fixture(name="make_core")
def make_core_fixture() -> Callable[..., EngineCore]:
    return make_core


@pytest.fixture(name="make_request")
def make_request_fixture() -> Callable[..., Request]:
    return make_request


@pytest.fixture(name="run_core")
def run_core_fixture() -> Callable[..., dict[str, Finished]]:
    return run_core


_GGUF_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="session")
def demo_weights(demo_model: Path) -> tuple[ModelSpec, dict[str, torch.Tensor], dict[str, str]]:
    """The demo model as a loader with recipe keep would make it resident, read with the gguf package."""
    import gguf

    spec = ModelSpec(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, rms_norm_eps=9.999999747378752e-06, max_position_embeddings=8192,
        tie_word_embeddings=True, rope=RopeSpec(theta=100000.0),
    )  # fmt: skip
    tensors, layouts = {}, {}
    for stored in gguf.GGUFReader(demo_model).tensors:
        name, tensor = _canonical(stored.name), torch.from_numpy(np.array(stored.data))
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2], 0)
        if heads:  # llama.cpp interleaves the two halves of each head
            tensor = tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        kind = stored.tensor_type.name.lower()
        tensors[name], layouts[name] = tensor, "dense" if kind == "f32" else f"gguf.{kind}"
    return spec, tensors, layouts


def _canonical(name: str) -> str:
    if name.startswith("blk."):
        _, index, part, _ = name.split(".")
        return f"model.layers.{index}.{_GGUF_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
