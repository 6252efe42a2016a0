"""`preload daemon` with what its command line does not offer: another loader, and deadlines short enough to test.

"format_version_file" names a file with the version of the catalog that this daemon reads and writes.

run_daemon.py '{"loader_command": [...], "open_deadline_s": 0.2, "handover_deadline_s": 0.2}' --runtime-dir …
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from preload.cli.options import add_options, given
from preload.daemon import disk, handover, leases, parking, service
from preload.daemon.config import DaemonConfig
from preload.daemon.server import run


def main() -> int:
    settings = json.loads(sys.argv[1])
    service._OPEN_DEADLINE_S = settings.pop("open_deadline_s", service._OPEN_DEADLINE_S)
    handover._DEADLINE_S = settings.pop("handover_deadline_s", handover._DEADLINE_S)
    leases.MAX_LEASES = settings.pop("max_leases", leases.MAX_LEASES)
    disk._DEADLINE_S = settings.pop("disk_deadline_s", disk._DEADLINE_S)
    if "format_version_file" in settings:
        parking.FORMAT_VERSION = int(Path(settings.pop("format_version_file")).read_text())
    parser = argparse.ArgumentParser()
    add_options(parser, DaemonConfig)
    logging.basicConfig(level=logging.INFO)
    words = given(parser.parse_args(sys.argv[2:]), DaemonConfig)
    return run(DaemonConfig(**words, **{key: tuple(value) for key, value in settings.items()}))


if __name__ == "__main__":
    sys.exit(main())
