"""`preload serve`: an OpenAI-compatible server over resident weights."""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace

from preload.engine.frontend.config import FrontendConfig

from .options import STARTING_S, add_load, add_options, add_wait_daemon, given


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
    with timeline.phase("load"):
        config = replace(config, generation=resident_generation(config, arguments.load, arguments.wait_daemon))
    return serve(config, timeline=timeline)


def resident_generation(config: FrontendConfig, load: bool, wait_s: float) -> str:
    """The id of what is to be served: every core asks for that, whatever becomes of the checkpoint's files.

    Loads the configured checkpoint, or, told not to, raises what an attach would raise. `wait_s`: for the daemon."""
    from preload.engine.client import Control
    from preload.engine.client.control import make_selector

    with Control(config.runtime_dir or None, wait_s=wait_s) as control:
        if config.generation:
            return control.check(make_selector(generation_id=config.generation))
        if not load:
            return control.check(make_selector(config.checkpoint, recipe=config.recipe()))
        from .load import load_with_progress

        return load_with_progress(control, config.checkpoint, config.recipe(), evict_lru=False).id
