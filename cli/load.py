"""`preload load`: make a checkpoint resident, with its progress."""

from __future__ import annotations

import argparse
import json

from .options import add_json, add_recipe, add_runtime_dir, recipe_of


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder or file: safetensors or GGUF")
    add_recipe(parser)
    parser.add_argument("--evict", choices=("none", "lru"), default="none", help="make room for it")
    add_runtime_dir(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.client import Control

    from .generations import generation_dict
    from .render import ProgressBar, size

    bar = ProgressBar("load")
    loaded = None
    with Control(arguments.runtime_dir) as control:
        for event in control.load(arguments.checkpoint, recipe_of(arguments), evict_lru=arguments.evict == "lru"):
            if event.WhichOneof("event") == "loaded":
                loaded = event.loaded
            elif event.progress.total_bytes:
                bar.update(event.progress.phase, event.progress.done_bytes, event.progress.total_bytes)
    bar.close()
    assert loaded is not None, "a load stream ends with the generation, or with an error"
    if arguments.json:
        print(json.dumps(generation_dict(loaded)))
    else:
        print(f"{loaded.id[:12]}  READY  {size(loaded.resident_bytes)} in {loaded.num_tensors} tensors")
    return 0
