"""`preload daemon`: keep weights resident until told to stop."""

from __future__ import annotations

import argparse

from preload.daemon.config import DaemonConfig, read_config

from .options import add_options, given


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, DaemonConfig)
    parser.add_argument("--verbose", action="store_true", help="log more")


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
    path = os.path.abspath(overrides.pop("config")) if "config" in overrides else ""

    def read() -> DaemonConfig:
        return read_config(path, overrides, LAYOUT_VERSION)

    return serve(read(), read)
