"""Conversion between engine_core.proto and the core's own types; nothing else knows the generated messages."""

from __future__ import annotations

from collections.abc import Sequence

from preload.protos import engine_core_pb2 as pb

from .request import FinishReason, Request, RequestOutput, SamplingParams

_FINISH_REASONS = {
    FinishReason.NONE: pb.FINISH_REASON_NONE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def request_from_proto(message: pb.AddRequest) -> Request:
    return Request(
        request_id=message.request_id,
        prompt_ids=list(message.prompt_ids),
        output_ids=list(message.output_ids),
        sampling=sampling_from_proto(message.sampling),
        priority=message.priority,
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
    )


def output_to_proto(output: RequestOutput) -> pb.RequestOutput:
    return pb.RequestOutput(
        request_id=output.request_id,
        token_ids=output.token_ids,
        logprobs=[
            pb.TokenLogprobs(logprob=t.logprob, top_ids=t.top_ids, top_logprobs=t.top_logprobs)
            for t in output.logprobs
        ],
        finish_reason=_FINISH_REASONS[output.finish_reason],
        error=output.error,
        num_draft_tokens=output.num_draft_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
    )


def step_to_proto(outputs: Sequence[RequestOutput]) -> pb.StepOutput:
    return pb.StepOutput(outputs=[output_to_proto(output) for output in outputs])
