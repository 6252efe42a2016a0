"""`SamplingParams`: how the tokens of one sample are chosen, and the seeds of parallel samples.

A request without a seed is given one here, once: randomness is a function of (seed, position), so a sample that is
continued by another core continues as the first would have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from preload.engine.core.structured import StructuredOutput
from preload.protos import engine_core_pb2 as pb

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """As in engine_core.proto; `stop_token_ids` holds the end-of-sequence ids unless they are ignored."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    num_top_logprobs: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    logits_processors: dict[str, str] = field(default_factory=dict)

    def for_sample(self, index: int) -> SamplingParams:
        """The parameters of the index-th parallel sample; the first one keeps the seed."""
        return replace(self, seed=derive_seed(self.seed, index))

    def to_proto(self) -> pb.SamplingParams:
        return pb.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            num_top_logprobs=self.num_top_logprobs,
            bad_words=[pb.TokenSequence(ids=ids) for ids in self.bad_words],
            allowed_token_ids=self.allowed_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            structured_output=_form_to_proto(self.structured_output),
            logits_processors=self.logits_processors,
        )


def _form_to_proto(form: StructuredOutput | None) -> pb.StructuredOutput | None:
    return pb.StructuredOutput(**{form.kind.value: form.text}) if form else None


def derive_seed(seed: int, index: int) -> int:
    """A seed of its own for each parallel sample: splitmix64 of (seed, index); index 0 is the seed itself.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    if index == 0:
        return seed & _MASK
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
