"""What clients may ask: the bodies of /v1/completions and /v1/chat/completions, parsed and validated.

Owns names, types, ranges and combinations of the fields, and nothing that needs a tokenizer but the size of the
vocabulary. Unknown fields are ignored; fields that are known and would change the answer in a way that is not
supported are refused.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from .config import MAX_SEQUENCES_PER_REQUEST
from .constraints import Constraints, parse_constraints
from .errors import BadRequestError
from .fields import Fields, token_ids, wrong_type
from .messages import parse_messages
from .tools import Tools, parse_tools
from .unsupported import CHAT_REFUSALS, COMPLETION_REFUSALS, refuse, unsupported

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 1 << 31
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT_LENGTH = 1024

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What both endpoints share. `max_tokens` is None where the client leaves it to the model's length."""

    model: str | None
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    seed: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    logprobs: bool
    num_top_logprobs: int
    prompt_logprobs: int | None
    """Of the prompt's tokens, and this many of the most likely ones in their place."""
    constraints: Constraints
    priority: int
    cache_salt: str


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """POST /v1/completions. `prompt_logprobs`: those in a field of their own, beside what `echo` shows."""

    options: GenerationOptions
    prompts: tuple[Prompt, ...]
    echo: bool
    prompt_logprobs: int | None


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """POST /v1/chat/completions. `messages` have plain text as their content."""

    options: GenerationOptions
    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    template_arguments: dict[str, Any]
    tools: Tools


def parse_completion(fields: Fields, vocab_size: int) -> CompletionRequest:
    """Raises BadRequestError naming the field."""
    refuse(fields, COMPLETION_REFUSALS)
    wanted = fields.get("logprobs")
    if isinstance(wanted, bool):
        raise wrong_type("logprobs", "an integer", wanted)
    num_top = fields.integer("logprobs", 0, 0, MAX_TOP_LOGPROBS)
    default = 16
    echo = fields.flag("echo")
    options = _options(
        fields,
        vocab_size,
        max_tokens=fields.integer("max_tokens", default, 1, MAX_TOKENS),
        logprobs=wanted is not None,
        num_top_logprobs=num_top,
        echoed_logprobs=num_top if echo and wanted is not None else None,
    )
    best_of = fields.integer("best_of", options.n, 1, MAX_SEQUENCES_PER_REQUEST)
    if best_of != options.n:
        raise unsupported("best_of", "must equal 'n'")
    prompts = _prompts(fields.get("prompt"), vocab_size)
    if len(prompts) * options.n > MAX_SEQUENCES_PER_REQUEST:
        raise BadRequestError(
            f"{len(prompts)} prompts times n={options.n} are more than {MAX_SEQUENCES_PER_REQUEST} completions",
            param="prompt",
            code="out_of_range",
        )
    return CompletionRequest(options=options, prompts=prompts, echo=echo, prompt_logprobs=_prompt_logprobs(fields))


def parse_chat(fields: Fields, vocab_size: int) -> ChatRequest:
    """Raises BadRequestError naming the field."""
    refuse(fields, CHAT_REFUSALS)
    num_top = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    logprobs = fields.flag("logprobs")
    if num_top and not logprobs:
        raise BadRequestError(
            "'top_logprobs' needs 'logprobs' to be true", param="top_logprobs", code="invalid_value"
        )
    limit_name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    limit = fields.integer(limit_name, 0, 1, MAX_TOKENS)
    options = _options(
        fields,
        vocab_size,
        max_tokens=limit or None,
        logprobs=logprobs,
        num_top_logprobs=num_top,
    )
    tools = _tools(fields, options)
    if tools.form is not None:
        options = replace(options, constraints=replace(options.constraints, form=tools.form))
    return ChatRequest(
        options=options,
        messages=parse_messages(fields.get("messages")),
        add_generation_prompt=fields.flag("add_generation_prompt", default=True),
        template_arguments=fields.object("chat_template_kwargs"),
        tools=tools,
    )


def _tools(fields: Fields, options: GenerationOptions) -> Tools:
    tools = parse_tools(fields)
    if tools.form is not None and options.constraints.form is not None:
        raise BadRequestError(
            f"'{options.constraints.form.param}' cannot be combined with tools that may be called",
            param=options.constraints.form.param,
            code="invalid_value",
        )
    return tools


def _options(
    fields: Fields,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: bool,
    num_top_logprobs: int,
    echoed_logprobs: int | None = None,
) -> GenerationOptions:
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    if stream_options and not stream:
        raise BadRequestError(
            "'stream_options' needs 'stream' to be true", param="stream_options", code="invalid_value"
        )
    prompt_logprobs = _prompt_logprobs(fields)
    if stream and prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "cannot be combined with 'stream'")
    return GenerationOptions(
        model=fields.text("model"),
        n=fields.integer("n", 1, 1, MAX_SEQUENCES_PER_REQUEST),
        stream=stream,
        include_usage=Fields(stream_options).flag("include_usage"),
        max_tokens=max_tokens,
        stop=_stop(fields.get("stop")),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_above_zero(fields, "top_p", 1.0),
        top_k=max(0, fields.integer("top_k", 0, -1, 1 << 31)),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_above_zero(fields, "repetition_penalty", 100.0),
        logit_bias=_logit_bias(fields.object("logit_bias"), vocab_size),
        seed=_seed(fields),
        stop_token_ids=_stop_token_ids(fields.get("stop_token_ids"), vocab_size),
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=_min_tokens(fields, max_tokens),
        logprobs=logprobs,
        num_top_logprobs=num_top_logprobs,
        prompt_logprobs=max((n for n in (prompt_logprobs, echoed_logprobs) if n is not None), default=None),
        priority=fields.integer("priority", 0, -(1 << 31), (1 << 31) - 1),
        cache_salt=_cache_salt(fields),
        constraints=parse_constraints(fields, vocab_size),
    )


def _above_zero(fields: Fields, name: str, high: float) -> float:
    """A number of which 0 means nothing. 1.0 where it is not given."""
    value = fields.number(name, 1.0, 0.0, high)
    if value == 0.0:
        raise BadRequestError(f"{name!r} must be above 0", param=name, code="out_of_range")
    return value


def _min_tokens(fields: Fields, max_tokens: int | None) -> int:
    min_tokens = fields.integer("min_tokens", 0, 0, MAX_TOKENS)
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequestError(
            f"'min_tokens' is {min_tokens}, more than the {max_tokens} tokens the answer may have",
            param="min_tokens",
            code="out_of_range",
        )
    return min_tokens


def _prompt_logprobs(fields: Fields) -> int | None:
    value = fields.get("prompt_logprobs")
    if value is None or value is False:
        return None
    return fields.integer("prompt_logprobs", 0, 0, MAX_TOP_LOGPROBS)


def _seed(fields: Fields) -> int:
    if fields.get("seed") is None:
        return secrets.randbits(63)
    return fields.integer("seed", 0, -(1 << 63), (1 << 64) - 1) & ((1 << 64) - 1)


def _cache_salt(fields: Fields) -> str:
    salt = fields.text("cache_salt") or ""
    if len(salt) > MAX_CACHE_SALT_LENGTH:
        raise BadRequestError(
            f"'cache_salt' has {len(salt)} characters; at most {MAX_CACHE_SALT_LENGTH} are allowed",
            param="cache_salt",
            code="out_of_range",
        )
    return salt


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise wrong_type("stop", "a string or an array of strings", value)
    if len(items) > MAX_STOP_STRINGS:
        raise BadRequestError(
            f"'stop' holds {len(items)} strings; at most {MAX_STOP_STRINGS} are allowed",
            param="stop",
            code="out_of_range",
        )
    for item in items:
        if not 1 <= len(item) <= MAX_STOP_LENGTH:
            raise BadRequestError(
                f"a stop string has {len(item)} characters; allowed are 1 to {MAX_STOP_LENGTH}",
                param="stop",
                code="out_of_range",
            )
    return tuple(items)


def _stop_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong_type("stop_token_ids", "an array of token ids", value)
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise BadRequestError(
            f"'stop_token_ids' holds {len(value)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed",
            param="stop_token_ids",
            code="out_of_range",
        )
    return token_ids("stop_token_ids", value, vocab_size)


def _logit_bias(values: dict[str, Any], vocab_size: int) -> dict[int, float]:
    if len(values) > MAX_LOGIT_BIAS:
        raise BadRequestError(
            f"'logit_bias' holds {len(values)} entries; at most {MAX_LOGIT_BIAS} are allowed",
            param="logit_bias",
            code="out_of_range",
        )
    biases = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise BadRequestError(
                f"'logit_bias' has the key {key[:40]!r}; keys are token ids from 0 to {vocab_size - 1}",
                param="logit_bias",
                code="invalid_value",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise BadRequestError(
                f"'logit_bias' of token {key} must be a number between -100 and 100",
                param="logit_bias",
                code="out_of_range",
            )
        biases[int(key)] = float(value)
    return biases


def _prompts(value: Any, vocab_size: int) -> tuple[Prompt, ...]:
    if value is None:
        raise BadRequestError("'prompt' is missing", param="prompt", code="missing_required_parameter")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, an array of strings, or token ids", value)
    if not value:
        raise BadRequestError("'prompt' is an empty array", param="prompt", code="empty_array")
    if len(value) > MAX_SEQUENCES_PER_REQUEST and not isinstance(value[0], int):
        raise BadRequestError(
            f"'prompt' holds {len(value)} prompts; at most {MAX_SEQUENCES_PER_REQUEST} are allowed",
            param="prompt",
            code="out_of_range",
        )
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) for item in value):
        return tuple(token_ids("prompt", item, vocab_size) for item in value)
    return (token_ids("prompt", value, vocab_size),)
