"""Conversion between engine_core.proto and the core's own types; nothing else knows the generated messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from preload.engine.errors import RequestError
from preload.protos import engine_core_pb2 as pb

from .grammar import Vocabulary
from .request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from .structured import FormKind, StructuredOutput

_FINISH_REASONS = {
    FinishReason.NONE: pb.FINISH_REASON_NONE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def request_from_proto(message: pb.AddRequest) -> Request:
    """Raises RequestError if parameters of a custom processor are no JSON."""
    return Request(
        request_id=message.request_id,
        prompt_ids=list(message.prompt_ids),
        output_ids=list(message.output_ids),
        sampling=sampling_from_proto(message.sampling),
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """top_p and repetition_penalty of 0 read as 1, as the contract says."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs,
        num_top_logprobs=message.num_top_logprobs,
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        allowed_token_ids=frozenset(message.allowed_token_ids),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        structured_output=_form_from_proto(message.structured_output),
        logits_processors=_parameters(message.logits_processors) if message.logits_processors else {},
    )


def _form_from_proto(message: pb.StructuredOutput) -> StructuredOutput | None:
    field = message.WhichOneof("form")
    return StructuredOutput(FormKind(field), getattr(message, field)) if field else None


def _parameters(texts: Mapping[str, str]) -> dict[str, Any]:
    try:
        return {name: json.loads(text) for name, text in texts.items()}
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"parameters of a logits processor are no JSON: {error}", {"param": "logits_processors"}
        ) from error


def vocabulary_from_proto(message: pb.Vocabulary) -> Vocabulary:
    return Vocabulary(
        tokens=tuple(message.tokens),
        special_ids=frozenset(message.special_ids),
        eos_ids=tuple(message.eos_ids),
    )


def output_to_proto(output: RequestOutput) -> pb.RequestOutput:
    return pb.RequestOutput(
        request_id=output.request_id,
        token_ids=output.token_ids,
        logprobs=[_logprobs_to_proto(token) for token in output.logprobs],
        finish_reason=_FINISH_REASONS[output.finish_reason],
        error=output.error,
        refused=output.refused,
        draining=output.draining,
        param=output.param,
        prompt_logprobs=[_logprobs_to_proto(token) for token in output.prompt_logprobs],
        num_draft_tokens=output.num_draft_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
        num_cached_tokens=output.num_cached_tokens,
    )


def _logprobs_to_proto(token: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=token.logprob, top_ids=token.top_ids, top_logprobs=token.top_logprobs, rank=token.rank
    )


def step_to_proto(outputs: Sequence[RequestOutput]) -> pb.StepOutput:
    return pb.StepOutput(outputs=[output_to_proto(output) for output in outputs])
