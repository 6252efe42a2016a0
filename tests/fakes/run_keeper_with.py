"""`preload keeper` with a command and times of a test's choice. All other words are the daemon's.

run_keeper_with.py '{"command": [...], "watchdog_s": 10, "stop_timeout_s": 20}' --runtime-dir DIR …
"""

from __future__ import annotations

import json
import logging
import sys

from preload.daemon import runtime_folder
from preload.daemon.keeper import Keeper


def main() -> int:
    settings = json.loads(sys.argv[1])
    command = settings.get("command") or [sys.executable, "-m", "preload.cli.main", "daemon"]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper %(levelname)s %(message)s")
    runtime_dir = runtime_folder.prepare(sys.argv[sys.argv.index("--runtime-dir") + 1])
    times = (settings.get("watchdog_s", 30.0), settings.get("stop_timeout_s", 20.0))
    return Keeper(runtime_dir, [*command, *sys.argv[2:]], *times).run()


if __name__ == "__main__":
    sys.exit(main())
