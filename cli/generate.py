"""`preload generate`: complete one prompt from resident weights, without a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from preload.engine.frontend.config import FrontendConfig

from .options import (
    STARTING_S,
    add_checkpoint,
    add_daemon,
    add_device,
    add_json,
    add_load,
    add_options,
    add_recipe,
    given,
    positive,
)

_COMPUTING = ("matmul_precision", "kv_cache_dtype")
"""Of the server's settings, those that change how a single answer is computed."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("prompt", help="text to complete; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument(
        "--max-tokens", type=positive, default=128, metavar="COUNT", help="tokens of answer at most (128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus of this mass (default: 1)")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="makes sampling repeatable")
    add_recipe(parser)
    add_device(parser, "host")
    add_options(parser, FrontendConfig, only=_COMPUTING)
    add_load(parser)
    add_daemon(parser, STARTING_S)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from .serve import with_generations

    config = FrontendConfig(
        checkpoint=arguments.checkpoint,
        runtime_dir=arguments.runtime_dir or "",
        model=arguments.model,
        quantization=arguments.quantization,
        compute_dtype=arguments.compute_dtype,
        config_overrides=arguments.config_overrides,
        device=arguments.device,
        max_num_seqs=1,
        **{name: value for name, value in given(arguments, FrontendConfig).items() if name in _COMPUTING},
    )
    config = with_generations(config, load=arguments.load, wait_s=arguments.wait_daemon)
    text, finish_reason, usage = asyncio.run(_stream(config, arguments))
    if arguments.json:
        print(json.dumps({"text": text, "finish_reason": finish_reason, "usage": usage}))
    else:
        print()
    return 0


async def _stream(config: FrontendConfig, arguments: argparse.Namespace) -> tuple[str, str | None, Any]:
    from preload.engine.frontend.offline import complete

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    body = {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "stream_options": {"include_usage": True},
        **({"messages": [{"role": "user", "content": prompt}]} if arguments.chat else {"prompt": prompt}),
    }
    pieces: list[str] = []
    finish_reason, usage = None, None
    async for event in complete(config, body, chat=arguments.chat):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = (choice["delta"].get("content") if arguments.chat else choice["text"]) or ""
            finish_reason = choice["finish_reason"] or finish_reason
            pieces.append(piece)
            if not arguments.json:
                print(piece, end="", flush=True)
    return "".join(pieces), finish_reason, usage
