"""`preload template`: keep an engine core's imports ready, and fork cores from them."""

from __future__ import annotations

import argparse

from .options import add_runtime_dir


def configure(parser: argparse.ArgumentParser) -> None:
    add_runtime_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.template.fingerprint import place_of
    from preload.engine.template.process import run as serve

    return serve(place_of(arguments.runtime_dir), detached=False)
