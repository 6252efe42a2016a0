"""Fields that clients of this API know and that would change the answer in a way this server cannot: refused.

A field is refused only when its value asks for something; a client that spells out the default is served.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import BadRequestError
from .fields import Fields

Refusal = tuple[str, tuple[Any, ...]]
"""Name of a field, and the values beside null that ask for nothing."""

_COMMON: tuple[Refusal, ...] = (
    ("response_format", ({"type": "text"},)),
    ("structured_outputs", ({},)),
    ("guided_json", ()),
    ("guided_regex", ()),
    ("guided_choice", ()),
    ("guided_grammar", ()),
    ("use_beam_search", (False,)),
    ("logits_processors", ([],)),
    ("bad_words", ([],)),
    ("allowed_token_ids", ()),
    ("prompt_logprobs", (0, False)),
    ("truncate_prompt_tokens", ()),
    ("include_stop_str_in_output", (False,)),
    ("skip_special_tokens", (True,)),
    ("return_token_ids", (False,)),
)

COMPLETION_REFUSALS: tuple[Refusal, ...] = (
    *_COMMON,
    ("suffix", ("",)),
    ("prompt_embeds", ()),
)

CHAT_REFUSALS: tuple[Refusal, ...] = (
    *_COMMON,
    ("tools", ([],)),
    ("functions", ([],)),
    ("tool_choice", ("none", "auto")),
    ("function_call", ("none", "auto")),
    ("modalities", ([], ["text"])),
    ("audio", ()),
    ("prediction", ()),
    ("web_search_options", ()),
    ("chat_template", ()),
    ("continue_final_message", (False,)),
    ("echo", (False,)),
)


def refuse(fields: Fields, refusals: Iterable[Refusal]) -> None:
    """Raises BadRequestError naming the first field that asks for something unsupported."""
    for name, harmless in refusals:
        value = fields.get(name)
        if value is not None and not any(value == ok and type(value) is type(ok) for ok in harmless):
            raise unsupported(name, "asks for something this server does not do")


def unsupported(param: str, reason: str) -> BadRequestError:
    """The refusal of a field that is known and not supported."""
    return BadRequestError(f"'{param}' {reason}", param=param, code="unsupported_parameter")
