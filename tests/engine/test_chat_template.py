"""Chat templates render as transformers renders them, and cannot get out of their sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preload.engine.frontend.chat_template import ChatTemplate
from preload.engine.frontend.errors import BadRequestError, StartError
from preload.engine.frontend.tokenizer_files import load_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "a < b && 'c' \u00e9"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why?"},
]
BLOCKS = """{%- set names = {'user': 'U', 'assistant': 'A'} %}
{{ bos_token }}
    {% for message in messages %}
        {% if loop.index0 % 2 == 0 and message['role'] != 'user' %}
            {{ raise_exception('roles must alternate') }}
        {% endif %}
        {% if loop.last %}{% continue %}{% endif %}
{{ names[message.role] }}: {{ message['content'] | trim | tojson }}
    {% endfor %}
{{ extra | tojson(indent=2) }}
{% generation %}
{% set inner = 'said' %}{{ inner }}
{% endgeneration %}
{% if add_generation_prompt %}A:{% endif %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, origin="a test", special_tokens={"bos_token": "<s>"})


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(demo_model: Path, add_generation_prompt: bool) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>")
    own = load_tokenizer(str(demo_model)).chat_template
    assert own is not None
    for source in (own, BLOCKS):
        expected = reference.apply_chat_template(
            MESSAGES,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            extra={"b": [1], "a": "é<"},
        )
        rendered = template(source).render(
            MESSAGES, add_generation_prompt=add_generation_prompt, arguments={"extra": {"b": [1], "a": "é<"}}
        )
        assert rendered == expected


def test_the_date_is_there_for_templates_that_ask() -> None:
    assert template("{{ strftime_now('%Y') }}").render(MESSAGES).isdigit()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}", "too large"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_template_that_fails_refuses_the_request_in_its_own_words(source: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        template(source).render(MESSAGES)
    assert caught.value.code == "chat_template_error"


def test_a_template_that_does_not_compile_stops_the_start_naming_its_origin() -> None:
    with pytest.raises(StartError, match=r"a test does not compile.*line 2"):
        template("\n{% for %}")
