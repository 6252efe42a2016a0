"""`preload serve`: an OpenAI-compatible server over resident weights."""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from preload.engine.frontend.config import FrontendConfig

from .options import STARTING_S, add_load, add_options, add_wait_daemon, given

if TYPE_CHECKING:
    from preload.engine.client import Control
    from preload.engine.recipe import Recipe


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, FrontendConfig)
    add_load(parser)
    add_wait_daemon(parser, STARTING_S)


def run(arguments: argparse.Namespace) -> int:
    # Nothing that a start makes is garbage, and looking for some takes a tenth of it. `serve_http` turns it on again.
    gc.disable()
    from preload.engine.frontend.server import process_start_ns
    from preload.engine.frontend.server import run as serve
    from preload.engine.timeline import Timeline

    timeline = Timeline()
    timeline.add("exec", process_start_ns())
    config = FrontendConfig(**given(arguments, FrontendConfig))

    def prepare(config: FrontendConfig) -> FrontendConfig:
        return with_generations(config, load=arguments.load, wait_s=arguments.wait_daemon)

    return serve(config, timeline=timeline, prepare=prepare)


def with_generations(config: FrontendConfig, *, load: bool, wait_s: float) -> FrontendConfig:
    """With the ids of what is to be served: every core asks for those, whatever becomes of the checkpoints' files.

    Loads the configured checkpoints, or, told not to, raises what an attach would raise. `wait_s`: for the daemon.
    The device gets the name that it has everywhere, whatever order a core would see devices in."""
    from preload.engine.client import Control
    from preload.engine.cuda.devices import resolve_device

    if config.device:
        config = replace(config, device=resolve_device(config.device))
    with Control(config.runtime_dir or None, wait_s=wait_s) as control:
        find = partial(_resident, control, load=load, device=config.device)
        generation = find(config.generation, config.checkpoint, config.recipe(), "target")
        config = replace(config, generation=generation)
        if config.speculate == "draft":
            draft = find(config.draft_generation, config.draft_model, config.draft_recipe(), "draft")
            config = replace(config, draft_generation=draft)
    return config


def _resident(
    control: Control, known: str, checkpoint: str, recipe: Recipe, role: str, *, load: bool, device: str
) -> str:
    from preload.engine.client.control import make_selector
    from preload.engine.cuda.devices import HOST
    from preload.protos.weight_cache_pb2 import Rank

    if known:
        return control.check(make_selector(generation_id=known, device=device))
    device = device or HOST
    if not load:
        return control.check(make_selector(checkpoint, recipe=recipe, rank=Rank(role=role), device=device))
    from .load import load_with_progress

    return load_with_progress(control, checkpoint, recipe, evict_lru=False, role=role, device=device).id
