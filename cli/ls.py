"""`preload ls`: generations, one a line."""

from __future__ import annotations

import argparse
import json

from .options import add_json, add_runtime_dir


def configure(parser: argparse.ArgumentParser) -> None:
    add_runtime_dir(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.client import Control

    from .generations import HEADER, generation_dict, generation_row
    from .render import table

    with Control(arguments.runtime_dir) as control:
        generations = control.list().generations
    if arguments.json:
        print(json.dumps([generation_dict(g) for g in generations]))
    elif generations:
        print(table(HEADER, [generation_row(g) for g in generations]))
    else:
        print("nothing is resident")
    return 0
