"""`preload holder`: own the memory of one GPU behind IPC handles, so that it outlives the daemon."""

from __future__ import annotations

import argparse

from .options import add_runtime_dir, name

DEVICE_FAILED = 27
"""As a DeviceError is told anywhere: see exit_codes.py."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The daemon starts one by itself where it finds none; as a service of its own it outlives the daemon."
    )
    add_runtime_dir(parser)
    parser.add_argument(
        "--device", type=name, required=True, help="cuda:<index> as this process sees it, or a GPU's UUID"
    )


def run(arguments: argparse.Namespace) -> int:
    import logging

    from preload.daemon import runtime_folder
    from preload.daemon.holder import run as hold
    from preload.engine.cuda.devices import HOST, resolve_device
    from preload.engine.errors import RequestError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s preload-holder %(levelname)s %(message)s")
    device = resolve_device(arguments.device)
    if device == HOST:
        raise RequestError("--device host: memory of the host needs no holder")
    code = hold(arguments.runtime_dir or runtime_folder.default_runtime_dir(), device)
    return DEVICE_FAILED if code else 0
