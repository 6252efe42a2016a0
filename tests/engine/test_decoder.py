"""The decoder against transformers, for every rope variant and every way to split and mix a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from preload.engine.core.kv_cache import KVCache
from preload.engine.errors import ManifestError
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.models.decoder import Decoder

BLOCK_SIZE = 4
ROPES: dict[str, dict[str, Any]] = {
    "none": {},
    "theta": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


class Sequences:
    """Feeds chunks of several sequences to a decoder, as a runner would, and keeps every token's logits."""

    def __init__(self, decoder: Decoder, sequences: list[list[int]]) -> None:
        self.decoder = decoder
        self.sequences = sequences
        self.cache = KVCache(decoder.spec, 1 + 32 * len(sequences), BLOCK_SIZE, decoder.dtype)
        self.done = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, counts: dict[int, int]) -> None:
        """Computes the next counts[i] tokens of each sequence i."""
        order = sorted(counts, key=lambda i: counts[i] > 1)
        lengths = torch.tensor([counts[i] for i in order])
        positions = torch.cat([torch.arange(self.done[i], self.done[i] + counts[i]) for i in order])
        table = torch.tensor([list(range(1 + 32 * i, 33 + 32 * i)) for i in order], dtype=torch.int32)
        rows = torch.arange(len(order)).repeat_interleave(lengths)
        ids = [t for i in order for t in self.sequences[i][self.done[i] : self.done[i] + counts[i]]]
        batch = AttentionBatch(
            query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int(),
            seq_lens=torch.tensor([self.done[i] + counts[i] for i in order], dtype=torch.int32),
            block_table=table,
            slot_mapping=table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            num_decodes=sum(counts[i] == 1 for i in order),
        )
        hidden = self.decoder.forward(torch.tensor(ids), positions, self.cache.layers, batch)
        for i, part in zip(order, self.decoder.compute_logits(hidden).split(lengths.tolist()), strict=True):
            self.logits[i].append(part)
            self.done[i] += counts[i]


@pytest.mark.parametrize("rope", ROPES)
def test_a_whole_prompt_gives_the_logits_of_transformers(tiny_model: Any, rope: str) -> None:
    model = tiny_model(ROPES[rope], tie_word_embeddings=rope == "none")
    ids = torch.randint(97, (50,)).tolist()
    run = Sequences(model.decoder(), [ids])
    run.step({0: 50})
    torch.testing.assert_close(run.logits[0][0], model.logits(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rope", ["none", "yarn", "llama3"])
def test_any_split_and_any_mix_gives_the_same_logits(tiny_model: Any, rope: str, seed: int) -> None:
    model, rng = tiny_model(ROPES[rope], seed=seed), random.Random(seed)
    sequences = [[rng.randrange(97) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    run = Sequences(model.decoder(), sequences)
    while any(done < len(ids) for done, ids in zip(run.done, sequences, strict=True)):
        left = {i: len(ids) - run.done[i] for i, ids in enumerate(sequences) if run.done[i] < len(ids)}
        chosen = rng.sample(sorted(left), rng.randrange(1, len(left) + 1))
        run.step({i: rng.choice((1, min(left[i], rng.randrange(1, 20)))) for i in chosen})
    for ids, logits in zip(sequences, run.logits, strict=True):
        torch.testing.assert_close(torch.cat(logits), model.logits(ids), atol=1e-4, rtol=1e-4)


def test_dynamic_scaling_beyond_the_original_length_equals_transformers_token_by_token(tiny_model: Any) -> None:
    model = tiny_model(ROPES["dynamic"], max_position_embeddings=16)
    ids = torch.randint(97, (40,)).tolist()
    with torch.no_grad():
        first = model.oracle(torch.tensor([ids[:16]]), use_cache=True)
        expected, cache = [first.logits[0]], first.past_key_values
        for token in ids[16:]:
            out = model.oracle(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            expected.append(out.logits[0])
            cache = out.past_key_values
    run = Sequences(model.decoder(), [ids])
    for count in (7, 20, 13):
        run.step({0: count})
    torch.testing.assert_close(torch.cat(run.logits[0]), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_biases_and_a_head_dim_of_its_own_are_honoured(tiny_model: Any) -> None:
    model = tiny_model(attention_bias=True, mlp_bias=True, head_dim=24, num_key_value_heads=1)
    ids = torch.randint(97, (20,)).tolist()
    run = Sequences(model.decoder(), [ids])
    run.step({0: 20})
    torch.testing.assert_close(run.logits[0][0], model.logits(ids), atol=1e-4, rtol=1e-4)


def test_rope_freqs_divide_the_frequencies(tiny_model: Any) -> None:
    model = tiny_model()
    linear = tiny_model(ROPES["linear"])
    model.tensors["rope_freqs.weight"] = torch.full((8,), 4.0)
    ids = torch.randint(97, (30,)).tolist()
    run = Sequences(model.decoder(), [ids])
    run.step({0: 30})
    torch.testing.assert_close(run.logits[0][0], linear.logits(ids), atol=1e-4, rtol=1e-4)


def test_bfloat16_stays_near_float32(tiny_model: Any) -> None:
    model = tiny_model()
    ids = torch.randint(97, (30,)).tolist()
    model.tensors = {name: tensor.bfloat16() for name, tensor in model.tensors.items()}
    run = Sequences(model.decoder(torch.bfloat16), [ids])
    run.step({0: 30})
    expected = model.logits(ids)
    assert (run.logits[0][0] - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(3)), "no use for these tensors: extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"model.norm.weight has shape \[5\]"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(97, 5)}), r"lm_head.weight .* shape \[97, 5\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32).half()}), "model.norm.weight is torch.float16"),
    ],
)
def test_tensors_that_do_not_match_the_model_are_refused_by_name(tiny_model: Any, change: Any, message: str) -> None:
    model = tiny_model()
    change(model.tensors)
    with pytest.raises(ManifestError, match=message):
        model.decoder()


def test_an_unknown_rope_scaling_or_a_missing_parameter_is_refused(tiny_model: Any) -> None:
    from dataclasses import replace

    from preload.engine.layers.rope import RotaryEmbedding
    from preload.engine.models.spec import RopeSpec

    spec = tiny_model().spec
    with pytest.raises(ManifestError, match="longrope"):
        RotaryEmbedding(replace(spec, rope=RopeSpec(scaling="longrope")))
    with pytest.raises(ManifestError, match="low_freq_factor"):
        RotaryEmbedding(replace(spec, rope=RopeSpec(scaling="llama3", parameters={"factor": 8.0})))
