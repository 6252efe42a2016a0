"""`preload load`: make a checkpoint resident, with its progress."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from preload.engine.errors import InternalDaemonError

from .options import add_json, add_recipe, add_runtime_dir, recipe_of

if TYPE_CHECKING:
    from preload.engine.client import Control
    from preload.engine.recipe import Recipe
    from preload.protos import weight_cache_pb2 as pb


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder or file: safetensors or GGUF")
    add_recipe(parser)
    parser.add_argument("--evict", choices=("none", "lru"), default="none", help="make room for it")
    add_runtime_dir(parser)
    add_json(parser)


def load_with_progress(control: Control, checkpoint: str, recipe: Recipe, *, evict_lru: bool) -> pb.Generation:
    """Shows a bar while a loader works; a generation that is resident already shows none. Raises PreloadError."""
    from .render import ProgressBar

    bar = ProgressBar("load")
    try:
        for event in control.load(checkpoint, recipe, evict_lru=evict_lru):
            if event.WhichOneof("event") == "loaded":
                return event.loaded
            if event.progress.total_bytes:
                bar.update(event.progress.phase, event.progress.done_bytes, event.progress.total_bytes)
    finally:
        bar.close()
    raise InternalDaemonError(f"the load of {checkpoint} ended without a generation")


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.client import Control

    from .generations import generation_dict
    from .render import size

    with Control(arguments.runtime_dir) as control:
        evict_lru = arguments.evict == "lru"
        loaded = load_with_progress(control, arguments.checkpoint, recipe_of(arguments), evict_lru=evict_lru)
    if arguments.json:
        print(json.dumps(generation_dict(loaded)))
    else:
        print(f"{loaded.id[:12]}  READY  {size(loaded.resident_bytes)} in {loaded.num_tensors} tensors")
    return 0
