"""`preload daemon` with what its command line does not offer: another loader, and deadlines short enough to test.

run_daemon.py '{"loader_command": [...], "open_deadline_s": 0.2, "handover_deadline_s": 0.2}' --runtime-dir …
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

from preload.cli.options import add_options, given
from preload.daemon import handover, service
from preload.daemon.config import DaemonConfig
from preload.daemon.server import run


def main() -> int:
    settings = json.loads(sys.argv[1])
    service._OPEN_DEADLINE_S = settings.pop("open_deadline_s", service._OPEN_DEADLINE_S)
    handover._DEADLINE_S = settings.pop("handover_deadline_s", handover._DEADLINE_S)
    parser = argparse.ArgumentParser()
    add_options(parser, DaemonConfig)
    logging.basicConfig(level=logging.INFO)
    words = given(parser.parse_args(sys.argv[2:]), DaemonConfig)
    return run(DaemonConfig(**words, **{key: tuple(value) for key, value in settings.items()}))


if __name__ == "__main__":
    sys.exit(main())
