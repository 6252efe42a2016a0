"""`preload rollout`: update a running service to another checkpoint or other flags, without losing a request."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from preload.engine import errors
from preload.engine.errors import CoreError, PreloadError, RequestError

from .options import add_json, add_runtime_dir, name

_STATUS_S = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", help="URL, model name or process id of a `preload serve` of this user")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", type=name, metavar="CHECKPOINT", help="serve this checkpoint from now on")
    what.add_argument(
        "--restart", action="store_true", help="a fresh core, with the same weights and what --set says"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of `preload serve` to change, such as max_num_seqs=8 (may be given several times)",
    )
    parser.add_argument(
        "--evict-first",
        action="store_true",
        help="for hosts without room for two cores: requests wait while the old one ends and the new one starts",
    )
    parser.add_argument(
        "--drain-s", type=float, metavar="SECONDS", help="before requests move to a core of the same weights"
    )
    add_runtime_dir(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    found = find_service(services(arguments.runtime_dir), arguments.service)
    request = {
        "do": "update",
        "to": str(Path(arguments.to).absolute()) if arguments.to else "",
        "set": dict(_split(pair) for pair in arguments.set),
        "evict_first": arguments.evict_first,
        "drain_s": arguments.drain_s,
    }
    steps = []
    for step in ask(found["socket"], request, timeout_s=None):
        if "error" in step:
            raise _error(step)
        steps.append(step)
        if not arguments.json:
            print(f"{step['s']:8.2f} s  {step['step']:8}  {step['message']}", flush=True)
        if step["step"] == "done":
            break
    else:
        raise CoreError(f"the service {found['url']} ended in the middle of the update")
    if arguments.json:
        print(json.dumps({"service": found, "s": steps[-1]["s"], "steps": steps}))
    return 0


def _split(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals:
        raise RequestError(f"--set takes KEY=VALUE, not {pair!r}")
    return key.replace("-", "_"), value


def services(runtime_dir: str | None) -> list[dict[str, Any]]:
    """Every frontend of a runtime folder that answers: what it says of itself, and its "socket"."""
    from preload.engine.places import own_dir

    found = []
    for path in sorted(Path(own_dir(runtime_dir)).glob("frontend-*/admin.sock")):
        try:
            found += [{**answer, "socket": str(path)} for answer in ask(str(path), {"do": "status"}, _STATUS_S)]
        except OSError:
            continue  # left behind by a frontend that was killed
    return found


def find_service(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The one service of that URL, model name or process id. Raises RequestError naming those that there are."""
    if "://" in name:
        matching = [s for s in found if urlsplit(s["url"]).port == urlsplit(name).port]  # one port, one service
    else:
        matching = [s for s in found if name in (s["model"], str(s["pid"]))]
    if len(matching) != 1:
        there = ", ".join(f"{s['url']} ({s['model']}, pid {s['pid']})" for s in found) or "none"
        count = "no service" if not matching else "more than one service"
        raise RequestError(f"{count} is called {name!r}; there are: {there}")
    return matching[0]


def ask(path: str, request: dict[str, Any], timeout_s: float | None) -> Iterator[dict[str, Any]]:
    """The lines a frontend answers. Raises OSError when it does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                yield json.loads(line)


def _error(step: dict[str, Any]) -> PreloadError:
    """The frontend's error as if it had been raised here; a type that only frontends know is one of a core."""
    kind = getattr(errors, step["kind"], CoreError)
    return kind(step["error"]) if issubclass(kind, PreloadError) else CoreError(step["error"])
