"""`preload keeper` of a daemon that a test chooses: run_keeper.py COMMAND_JSON --runtime-dir DIR OPTIONS…

The options are the daemon's, with its runtime folder among them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

from preload.daemon import runtime_folder
from preload.daemon.keeper import Keeper


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime-dir", required=True)
    told, _ = parser.parse_known_args(sys.argv[2:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s preload-keeper %(levelname)s %(message)s")
    runtime_dir = runtime_folder.prepare(told.runtime_dir)
    command = [*json.loads(sys.argv[1]), *sys.argv[2:]]
    return Keeper(runtime_dir, command, watchdog_s=30.0, stop_timeout_s=20.0).run()


if __name__ == "__main__":
    sys.exit(main())
