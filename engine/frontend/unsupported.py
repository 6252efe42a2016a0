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
    ("use_beam_search", (False,)),
    ("truncate_prompt_tokens", ()),
    ("include_stop_str_in_output", (False,)),
    ("skip_special_tokens", (True,)),
    ("return_token_ids", (False,)),
)

RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}
"""Former names of fields, and what they are called now, here as in vLLM."""

COMPLETION_REFUSALS: tuple[Refusal, ...] = (
    *_COMMON,
    ("suffix", ("",)),
    ("prompt_embeds", ()),
)

CHAT_REFUSALS: tuple[Refusal, ...] = (
    *_COMMON,
    ("functions", ([],)),
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
    for name, present in RENAMED.items():
        if fields.get(name) is not None:
            raise unsupported(name, f"has another name now: {present}")
    for name, harmless in refusals:
        value = fields.get(name)
        if value is not None and not any(value == ok and type(value) is type(ok) for ok in harmless):
            raise unsupported(name, "asks for something this server does not do")


def unsupported(param: str, reason: str) -> BadRequestError:
    """The refusal of a field that is known and not supported."""
    return BadRequestError(f"'{param}' {reason}", param=param, code="unsupported_parameter")
