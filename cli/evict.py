"""`preload evict`: let go of a generation."""

from __future__ import annotations

import argparse
import json

from .options import add_json, add_runtime_dir, add_target, target_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_runtime_dir(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.client import Control

    from .generations import state_name

    with Control(arguments.runtime_dir) as control:
        answer = control.evict(target_of(arguments))
    name = answer.generation.id[:12] or f"#{answer.generation.serial}"
    if arguments.json:
        leases = len(answer.generation.leases)
        print(json.dumps({"id": answer.generation.id, "freed": answer.freed, "leases": leases}))
    elif answer.freed:
        print(f"{name} is freed")
    else:
        print(f"{name} is {state_name(answer.generation)}: freed when its {len(answer.generation.leases)} leases end")
    return 0
