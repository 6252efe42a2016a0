"""`preload evict`: let go of a generation, or forget all that have failed."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .options import add_daemon, add_json, add_target, control_of, target_of

if TYPE_CHECKING:
    from preload.engine.client import Control
    from preload.protos import weight_cache_pb2 as pb


def configure(parser: argparse.ArgumentParser) -> None:
    add_target(parser, optional=True)
    parser.add_argument("--failed", action="store_true", help="forget every generation that has FAILED instead")
    add_daemon(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.errors import RequestError

    if arguments.failed == bool(arguments.generation):
        raise RequestError("name a generation, or say --failed: one of them")
    with control_of(arguments) as control:
        answers = _evict_failed(control) if arguments.failed else [control.evict(target_of(arguments))]
    if arguments.json:
        evicted = [_dict(answer) for answer in answers]
        print(json.dumps({"evicted": evicted} if arguments.failed else evicted[0]))
    elif not answers:
        print("nothing has failed")
    for answer in [] if arguments.json else answers:
        print(_line(answer))
    return 0


def _evict_failed(control: Control) -> list[pb.EvictResponse]:
    """Those that somebody else evicts or loads anew meanwhile are gone as well."""
    from preload.engine.client.control import make_selector
    from preload.engine.errors import NotResidentError
    from preload.protos import weight_cache_pb2 as pb

    answers = []
    for generation in control.list().generations:
        if generation.state == pb.GENERATION_STATE_FAILED:
            try:
                answers.append(control.evict(make_selector(generation_id=f"@{generation.serial}")))
            except NotResidentError:
                continue
    return answers


def _dict(answer: pb.EvictResponse) -> dict[str, Any]:
    generation = answer.generation
    return {"id": generation.id, "freed": answer.freed, "leases": len(generation.leases)}


def _line(answer: pb.EvictResponse) -> str:
    from .generations import name_of, state_name
    from .render import count

    generation = answer.generation
    name, state = name_of(generation), state_name(generation)
    if answer.freed:
        return f"{name} is forgotten" if state == "FAILED" else f"{name} is freed"
    return f"{name} is {state}: freed when its {count(len(generation.leases), 'lease')} end"
