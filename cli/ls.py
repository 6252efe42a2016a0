"""`preload ls`: generations, one a line."""

from __future__ import annotations

import argparse
import json

from .options import add_daemon, add_json, control_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_daemon(parser)
    add_json(parser, "a JSON array with one object for each generation")


def run(arguments: argparse.Namespace) -> int:
    from .generations import HEADER, generation_dict, generation_row
    from .render import table

    with control_of(arguments) as control:
        generations = control.list().generations
    if arguments.json:
        print(json.dumps([generation_dict(g) for g in generations]))
    elif generations:
        print(table(HEADER, [generation_row(g) for g in generations]))
    else:
        print("nothing is resident")
    return 0
