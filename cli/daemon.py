"""`preload daemon`: keep weights resident until told to stop."""

from __future__ import annotations

import argparse

from preload.daemon.config import DaemonConfig, read_config
from preload.daemon.errors import BadRequestError
from preload.engine.errors import RequestError

from .options import add_options, given


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, DaemonConfig)
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_argument("--check-config", action="store_true", help="say whether this configuration is good, and end")


def run(arguments: argparse.Namespace) -> int:
    import logging
    import os

    from preload.daemon.server import run as serve
    from preload.engine.recipe import LAYOUT_VERSION

    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.INFO,
        format="%(asctime)s preload-daemon %(levelname)s %(message)s",
    )
    overrides = given(arguments, DaemonConfig)
    file = overrides.pop("config", None)
    if file == "":
        raise BadRequestError("--config names no file")
    path = os.path.abspath(file) if file else ""

    def read() -> DaemonConfig:
        return read_config(path, overrides, LAYOUT_VERSION)

    config = read()
    if arguments.check_config:
        _check(config)
        return 0
    return serve(config, read)


def _check(config: DaemonConfig) -> None:
    """Says what a daemon would make of it. Raises RequestError for a model that no loader would take."""
    from preload.engine.recipe import Recipe

    for source in config.models:
        try:
            Recipe(quantization=source.recipe.quantization, compute_dtype=source.recipe.compute_dtype)
        except RequestError as error:
            raise RequestError(f"models: {source.path}: {error.message}") from error
    for warning in config.warnings():
        print(f"warning: {warning}")
    print(f"good: {len(config.models)} models, {config.host_limit} of memory, serves in {config.runtime_dir}")
