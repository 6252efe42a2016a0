"""`preload keeper`: run the daemon under a supervisor that holds its weights while it restarts."""

from __future__ import annotations

import argparse
import sys

from .options import add_runtime_dir


def configure(parser: argparse.ArgumentParser) -> None:
    add_runtime_dir(parser)
    parser.add_argument(
        "--watchdog-s", type=float, default=10.0, metavar="S", help="kill a daemon silent for so long; 0 = never (10)"
    )
    parser.add_argument(
        "--stop-timeout-s", type=float, default=20.0, metavar="S", help="seconds the daemon has to stop (20)"
    )
    parser.add_argument(
        "daemon_options", nargs=argparse.REMAINDER, metavar="-- DAEMON_OPTIONS", help="options of `preload daemon`"
    )


def run(arguments: argparse.Namespace) -> int:
    import logging

    from preload.daemon import runtime_folder
    from preload.daemon.keeper import Keeper

    logging.basicConfig(level=logging.INFO, format="%(asctime)s preload-keeper %(levelname)s %(message)s")
    runtime_dir = runtime_folder.prepare(arguments.runtime_dir or runtime_folder.default_runtime_dir())
    if any(word.partition("=")[0] == "--runtime-dir" for word in arguments.daemon_options):
        from preload.engine.errors import RequestError

        raise RequestError("the daemon has the keeper's --runtime-dir: name it before the --")
    options = arguments.daemon_options[1:] if arguments.daemon_options[:1] == ["--"] else arguments.daemon_options
    command = [sys.executable, "-P", "-m", "preload.cli.main", "daemon", "--runtime-dir", str(runtime_dir), *options]
    return Keeper(runtime_dir, command, arguments.watchdog_s, arguments.stop_timeout_s).run()
