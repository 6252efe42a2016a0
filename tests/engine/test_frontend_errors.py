"""Every refusal has OpenAI's error shape, the right status, and names the field."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [99999999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a"] * 200}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 1000}, "n"),
    ({"prompt": "a", "n": "1"}, "n"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "logprobs": 100}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 100000}, "max_tokens"),
    ({"prompt": [1] * 9000}, "prompt"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "seed": 10**400}, "seed"),
    ({"prompt": "a", "temperature": 1e400}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop"),
    ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
        "response_format",
    ),
    ({"prompt": "a", "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"prompt": "a", "structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar"),
    ({"prompt": "a", "structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"prompt": "a", "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"prompt": "a", "structured_outputs": {"choice": ["x", ""]}}, "structured_outputs.choice"),
    ({"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    (
        {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"prompt": "a", "guided_json": {}}, "guided_json"),
    ({"prompt": "a", "bad_words": "x"}, "bad_words"),
    ({"prompt": "a", "bad_words": [" "]}, "bad_words"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [99999999]}, "allowed_token_ids"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "a", "logits_processors": ["x"]}, "logits_processors"),
    ({"prompt": "a", "logits_processors": {"missing": {}}}, "logits_processors"),
    ({"prompt": "a", "logits_processors": {"missing": {}}, "stream": True}, "logits_processors"),
    ({"prompt": "a", "model": 5}, "model"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "hi", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": USER, "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"messages": USER, "tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
        },
        "tools[0].function.parameters",
    ),
    (
        {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
        "tools",
    ),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    (
        {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"messages": USER, "tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    (
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format",
    ),
    ({"messages": USER, "logits_processors": {"missing": {}}}, "logits_processors"),
    ({"messages": USER, "modalities": ["audio"]}, "modalities"),
    ({"messages": USER, "audio": {"voice": "x"}}, "audio"),
    ({"messages": USER, "chat_template": "x"}, "chat_template"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": 1}, "logprobs"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": USER, "max_tokens": 100000}, "max_tokens"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
def test_a_bad_completion_request_is_refused_naming_the_field(
    frontend: Any, body: dict[str, Any], param: str
) -> None:
    # 1e400 is written as JSON's own number, which Python's encoder would not do.
    text = json.dumps(body).replace("Infinity", "1e400")
    response = frontend.post(COMPLETION, content=text)
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_chat_request_is_refused_naming_the_field(
    frontend: Any, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = frontend.post(CHAT, json={**body, "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")


def test_a_request_over_the_model_s_length_has_openai_s_code(frontend: Any) -> None:
    error = error_of(frontend.complete(prompt="a", max_tokens=8192))
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"\xff",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda b: str(b[:12]),
)
def test_a_body_that_is_no_json_object_is_refused(frontend: Any, body: bytes) -> None:
    response = frontend.post(COMPLETION, content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "harmless",
    [
        {"messages": [{"role": "user", "content": "\U0001f9a9"}]},
        {"user": "me", "unknown_field": {"x": 1}},
        {"tools": [], "response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none"},
        {"n": None, "stop": None, "temperature": None, "logit_bias": None, "stream_options": None},
    ],
)
def test_fields_that_ask_for_nothing_are_served(frontend: Any, harmless: dict[str, Any]) -> None:
    response = frontend.post(CHAT, json={"messages": USER, "max_tokens": 1, **harmless})
    assert response.status_code == 200, response.text


def test_another_model_is_404(frontend: Any) -> None:
    response = frontend.complete(model="gpt-4", prompt="a")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_an_unknown_path_is_404_and_a_wrong_method_405(frontend: Any) -> None:
    missing = frontend.get("/v2/anything")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = frontend.get(COMPLETION)
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_a_template_s_own_refusal_reaches_the_client(start_frontend: Callable[..., Any], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    frontend = start_frontend(chat_template=str(template))
    response = frontend.post(CHAT, json={"messages": USER})
    assert response.status_code == 400
    assert "roles must alternate" in error_of(response)["message"]


def test_a_body_over_the_limit_is_413_announced_or_not(start_frontend: Callable[..., Any]) -> None:
    frontend = start_frontend(max_body_bytes=1000)
    announced = frontend.post(COMPLETION, content=b"x" * 1001)
    assert (announced.status_code, error_of(announced)["code"]) == (413, "request_too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    chunked = frontend.post(COMPLETION, content=chunks())
    assert (chunked.status_code, error_of(chunked)["code"]) == (413, "request_too_large")
    assert frontend.complete(prompt="a").status_code == 200


def test_keys_are_asked_for_where_there_are_any_and_health_stays_open(
    start_frontend: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# staff\nfirst-key\n\nsecond-key\n")
    keys.chmod(0o600)
    frontend = start_frontend(api_key_file=str(keys))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
        response = frontend.post(COMPLETION, json={"prompt": "a"}, headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first-key", "second-key"):
        headers = {"Authorization": f"Bearer {key}"}
        assert frontend.post(COMPLETION, json={"prompt": "a"}, headers=headers).status_code == 200
    assert {frontend.get(path).status_code for path in ("/health", "/ready", "/metrics")} == {200}
    assert frontend.get("/v1/models").status_code == 401
    assert "first-key" not in frontend.log


def test_a_key_file_that_others_can_read_stops_the_start(
    prepare_frontend: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(0o644)
    frontend = prepare_frontend(api_key_file=str(keys))
    with pytest.raises(AssertionError, match="open to every user"):
        frontend.start()
    assert frontend.process.returncode == 1


def test_a_port_in_use_stops_the_start_naming_it(frontend: Any, prepare_frontend: Callable[..., Any]) -> None:
    second = prepare_frontend(port=frontend.port)
    with pytest.raises(AssertionError, match=f"port {frontend.port}: Address already in use"):
        second.start()


def test_refusals_do_not_end_the_connection(frontend: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=30)
    try:
        for body, status in (("{", 400), ('{"prompt": "a", "max_tokens": 1}', 200)):
            connection.request("POST", COMPLETION, body)
            response = connection.getresponse()
            response.read()
            assert response.status == status
    finally:
        connection.close()
