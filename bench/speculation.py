"""What speculation gains: the same requests, one at a time, with and without, in one run.

Servers of every kind run beside each other over one daemon, and are asked in turn. The text is the shipped prose, of
which each request has paragraphs of its own, so that no prompt is found in a cache. The draft model is the model
itself in int4_group32, for want of a smaller one: it is about as slow, so the figure to look for is that it does no
harm.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .peers.prompts import PROSE
from .processes import START_DEADLINE_S, BenchError, PrivateDaemon, Server, tell
from .statistics import machine

ROUNDS = 3
MAX_TOKENS = 160
TASKS = {
    "summarise": "Summarize the text below. Keep the names, the numbers and the words of the text.\n\n{}",
    "copy": "Repeat the text below, word for word.\n\n{}",
}
_PARAGRAPHS = 2
"""Of each prompt."""
_PROMPTS = 2
"""Of each task in a round."""


@dataclass(frozen=True)
class Answer:
    """`whole_s`: from sending to the last token; `decode_s`: from the first token to the last."""

    text: str
    num_tokens: int
    whole_s: float
    decode_s: float


def methods(checkpoint: str, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Options of `preload serve` by method."""
    draft = ("--speculate", "draft", "--draft-model", checkpoint, "--draft-quantization", "int4_group32")
    known = {"ngram": ("--speculate", "ngram"), "draft": draft}
    return {"plain": (), **{name: known[name] for name in names}}


def run(checkpoint: str, names: Sequence[str] = ("ngram", "draft"), words: Sequence[str] = ()) -> dict[str, Any]:
    """Tokens per second of each task and method, and their ratio to the plain ones: medians over the rounds.

    `words`: more options of every server. Raises BenchError if an answer is not the plain one."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon())
        servers = {}
        for name, own_words in methods(checkpoint, names).items():
            tell(f"starting a server: {name}")
            servers[name] = stack.enter_context(Server(daemon, checkpoint, *own_words, *words))
            ask(servers[name], "Name three colours.", 16)
        tasks = {task: _measure(task, template, servers) for task, template in TASKS.items()}
        accepted = {name: acceptance(server) for name, server in servers.items() if name != "plain"}
    return {"machine": machine(), "max_tokens": MAX_TOKENS, "tasks": tasks, "acceptance": accepted}


def _measure(task: str, template: str, servers: dict[str, Server]) -> dict[str, Any]:
    rounds = []
    for number in range(ROUNDS):
        tell(f"{task}, round {number + 1} of {ROUNDS}")
        rounds.append(_one_round([template.format(text) for text in _texts(task, number)], servers))
    figures: dict[str, Any] = {"answers_equal": True}
    for name in servers:
        each = [answers[name] for answers in rounds]
        figures[name] = {
            "tokens_per_s": _median([_rate(answers) for answers in each]),
            "decode_tokens_per_s": _median([_decode_rate(answers) for answers in each]),
            "num_tokens": sum(answer.num_tokens for answers in each for answer in answers),
        }
        if name != "plain":
            plain = [answers["plain"] for answers in rounds]
            pairs = list(zip(each, plain, strict=True))
            figures[name]["ratio"] = _median([_rate(a) / _rate(b) for a, b in pairs])
            figures[name]["decode_ratio"] = _median([_decode_rate(a) / _decode_rate(b) for a, b in pairs])
    return figures


def _one_round(prompts: Sequence[str], servers: dict[str, Server]) -> dict[str, list[Answer]]:
    answers: dict[str, list[Answer]] = {name: [] for name in servers}
    for index, prompt in enumerate(prompts):
        names = list(servers)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            answers[name].append(ask(servers[name], prompt, MAX_TOKENS))
        for name in names:
            if answers[name][-1].text != answers["plain"][-1].text:
                raise BenchError(f"with {name} the answer to {prompt[-60:]!r} is another than without")
    return answers


def _texts(task: str, number: int) -> list[str]:
    """Paragraphs that no other task and round has, as long as there are enough."""
    paragraphs = PROSE.read_text().strip().split("\n\n")
    first = (list(TASKS).index(task) * ROUNDS + number) * _PROMPTS * _PARAGRAPHS
    starts = (first + i * _PARAGRAPHS for i in range(_PROMPTS))
    return ["\n\n".join(paragraphs[(s + i) % len(paragraphs)] for i in range(_PARAGRAPHS)) for s in starts]


def ask(server: Server, content: str, max_tokens: int) -> Answer:
    """A greedy, streamed answer. Raises BenchError on anything but an answer."""
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_DEADLINE_S)
    pieces, times, num_tokens = [], [], 0
    with contextlib.closing(connection):
        sent_s = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise BenchError(f"status {response.status}: {response.read().decode(errors='replace')}")
        for raw in response:
            line = raw.decode().strip()
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise BenchError(f"the stream ended with {event['error']}")
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        pieces.append(choice["delta"]["content"])
                        times.append(time.perf_counter())
    if num_tokens < 2 or not times:
        raise BenchError(f"the answer to {content[-60:]!r} is too short to be measured")
    return Answer("".join(pieces), num_tokens, times[-1] - sent_s, times[-1] - times[0])


def acceptance(server: Server) -> list[dict[str, float]]:
    """By position in a draft: how many guesses were verified, and what part of them was kept."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = {
        (what, int(position)): float(value)
        for what, position, value in re.findall(
            r'^preload_frontend_(drafted|accepted)_tokens_total\{position="(\d+)"\} (\S+)$', text, re.MULTILINE
        )
    }
    positions = sorted(position for what, position in found if what == "drafted")
    return [
        {"drafted": found["drafted", p], "accepted": round(found["accepted", p] / found["drafted", p], 3)}
        for p in positions
    ]


def _rate(answers: Sequence[Answer]) -> float:
    return sum(answer.num_tokens for answer in answers) / sum(answer.whole_s for answer in answers)


def _decode_rate(answers: Sequence[Answer]) -> float:
    return sum(answer.num_tokens - 1 for answer in answers) / sum(answer.decode_s for answer in answers)


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)
