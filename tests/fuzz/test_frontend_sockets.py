"""The frontend under attack: its HTTP port, and its operator's socket. The core behind it is a fake."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/demo",
    "/health",
    "/ready",
    "/debug/cores",
)
GOOD = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "n", "stream", "stream_options", "stop", "stop_token_ids", "logprobs", "top_logprobs", "logit_bias", "seed",
    "echo", "presence_penalty", "frequency_penalty", "repetition_penalty", "best_of", "min_tokens", "ignore_eos",
    "suffix", "user", "tools", "tool_choice", "response_format", "chat_template_kwargs", "add_generation_prompt",
    "functions",
)  # fmt: skip


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    scalars = (
        None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63), 1e308, -0.0, 0.5, "", "x", "\0", "\ud800",
        "é" * 9, "a" * 3000, "<|im_start|>", "{{ 7 * 7 }}", "demo", [], {}, "1e9", 10**400,
    )  # fmt: skip
    if depth > 3 or rng.random() < 0.7:
        return rng.choice(scalars)
    if rng.random() < 0.5:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    keys = ("role", "content", "type", "text", "image_url", "5", "x", "", "name", "tool_calls", "include_usage")
    return {rng.choice(keys): odd_value(rng, depth + 1) for _ in range(rng.randrange(5))}


def odd_messages(rng: random.Random) -> Any:
    roles = ("user", "assistant", "system", "tool", "developer", "", None, 5)
    return [
        {
            "role": rng.choice(roles),
            "content": rng.choice(("hello", None, odd_value(rng), [{"type": "text", "text": "a"}])),
        }
        for _ in range(rng.randrange(5))
    ]


def body(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that is JSON of the right kind with something odd in it, or hardly JSON."""
    path = rng.choice(PATHS[:2])
    value: dict[str, Any] = {"max_tokens": rng.choice((1, 5)), "model": "demo"}
    value |= {"prompt": rng.choice(("hi", [1, 2], ["a", "b"], [[1], [2]]))} if path == PATHS[0] else {}
    value |= {"messages": odd_messages(rng)} if path == PATHS[1] else {}
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        value[rng.choice(FIELDS)] = odd_value(rng)
    data = json.dumps(value).encode()
    match rng.randrange(8):
        case 0:
            data = data.replace(b"\\ud800", b"\xff\xfe")
        case 1:
            data = b'{"prompt": ' + rng.choice((b"[", b'{"a":')) * rng.choice((10, 5000, 200_000))
        case 2:
            data = data[:-1] + rng.choice(
                (b', "max_tokens": NaN}', b', "x": Infinity}', b"", b"}}", b', "prompt": "again"}')
            )
        case 3:
            data = rng.choice((b"", b"null", b"[]", b"7", b'"x"', b"\xef\xbb\xbf{}", data.decode().encode("utf-16")))
    return path, data


@pytest.fixture
def frontend(start_frontend: Callable[..., Any]) -> Any:
    return start_frontend(client_timeout_s=5.0, request_timeout_s=5.0)


def check(frontend: Any) -> None:
    answer = frontend.complete(**GOOD)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    (core,) = [core for core in frontend.cores() if core["state"] != "dead"]
    assert core["serial"] == 0, "the first core still serves"


def test_the_http_port(frontend: Any, attack: Any, fuzzing: Any) -> None:
    class Door(fuzzing.HttpDoor):  # type: ignore[misc]
        @property
        def moves(self) -> Any:
            return [*super().moves, *[self.request] * 200]

        def request(self, rng: random.Random) -> None:
            path, data = body(rng)
            if rng.random() < 0.1:
                data = fuzzing.mutate(rng, data)
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            with self.connect() as sock:
                sock.sendall(head + data)
                sock.settimeout(rng.choice((0.001, 2.0)))
                answer = sock.recv(65536)
            assert not answer.startswith(b"HTTP/1.1 500"), (path, data[:2000], answer)

    door = Door(frontend.port, PATHS, burst=300)
    attack("the frontend's HTTP port", frontend.process, lambda: frontend.log, lambda: check(frontend), door)


def test_the_operators_socket(frontend: Any, attack: Any, fuzzing: Any) -> None:
    (path,) = frontend.runtime_dir.glob("frontend-*/admin.sock")

    class Door:
        def __init__(self) -> None:
            self.held: list[socket.socket] = []
            self.moves = [self.line]

        def line(self, rng: random.Random) -> None:
            sock = socket.socket(socket.AF_UNIX)
            self.held.append(sock)
            if len(self.held) > 20:
                self.held.pop(0).close()
            sock.settimeout(5.0)
            sock.connect(str(path))
            keys = ("to", "set", "evict_first", "drain_s", "x")
            asked = {"do": rng.choice(("status", "stop", None, 7, ["update"])), rng.choice(keys): odd_value(rng)}
            data = rng.choice((json.dumps(asked).encode() + b"\n", fuzzing.junk(rng, 70_000), b"[" * 60_000 + b"\n"))
            sock.sendall(data)
            if data.endswith(b"\n"):
                sock.settimeout(0.3)
                sock.recv(65536)

        def close(self) -> None:
            for sock in self.held:
                sock.close()
            self.held.clear()

    attack("admin.sock", frontend.process, lambda: frontend.log, lambda: check(frontend), Door())
