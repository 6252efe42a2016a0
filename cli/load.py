"""`preload load`: make a checkpoint resident, with its progress."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from preload.engine.errors import InternalDaemonError

from .options import STARTING_S, add_checkpoint, add_daemon, add_device, add_json, add_recipe, control_of, recipe_of

if TYPE_CHECKING:
    from preload.engine.client import Control
    from preload.engine.recipe import Recipe
    from preload.protos import weight_cache_pb2 as pb

_MAX_NAMED = 3


def configure(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_recipe(parser)
    add_device(parser, "host")
    parser.add_argument("--evict", choices=("none", "lru"), default="none", help="make room for it")
    add_daemon(parser, STARTING_S)
    add_json(parser)


def load_with_progress(
    control: Control, checkpoint: str, recipe: Recipe, *, evict_lru: bool, role: str = "target", device: str = "host"
) -> pb.Generation:
    """Shows a bar while a loader works, and says which files are loaded anew because they have changed; a generation
    that is resident already shows nothing. Raises PreloadError."""
    from .render import ProgressBar

    bar = ProgressBar("load")
    try:
        for event in control.load(checkpoint, recipe, evict_lru=evict_lru, role=role, device=device):
            if event.WhichOneof("event") == "loaded":
                return event.loaded
            if event.WhichOneof("event") == "changed":
                bar.close()
                print(_changed(event.changed), file=sys.stderr, flush=True)
            elif event.progress.total_bytes:
                bar.update(event.progress.phase, event.progress.done_bytes, event.progress.total_bytes)
    finally:
        bar.close()
    raise InternalDaemonError(f"the load of {checkpoint} ended without a generation")


def _changed(changed: pb.Changed) -> str:
    named = ", ".join(changed.paths[:_MAX_NAMED])
    others = f" and {len(changed.paths) - _MAX_NAMED} more" if len(changed.paths) > _MAX_NAMED else ""
    return (
        f"preload: {named}{others} changed on disk since generation {changed.generation_id[:12]} was loaded: "
        "loading anew"
    )


def run(arguments: argparse.Namespace) -> int:
    from .generations import generation_dict
    from .render import count, size

    evict_lru, recipe, device = arguments.evict == "lru", recipe_of(arguments), arguments.device
    with control_of(arguments) as control:
        loaded = load_with_progress(control, arguments.checkpoint, recipe, evict_lru=evict_lru, device=device)
    if arguments.json:
        print(json.dumps(generation_dict(loaded)))
    else:
        where = "" if loaded.device == "host" else f" on {loaded.device}"
        what = f"{size(loaded.resident_bytes)} in {count(loaded.num_tensors, 'tensor')}"
        print(f"{loaded.id[:12]}  READY  {what}{where}")
    return 0
