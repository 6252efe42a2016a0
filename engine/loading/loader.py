"""The loader command: one job from the daemon over an inherited socket, then exit.

    python -m preload.engine.loading.loader --control-fd N

Exit codes: 0 done; 1 failed (and said so) or crashed (traceback on stderr, which the daemon keeps); 2 the daemon
went away. Imports nothing of weight before it has noted the time, so that its imports are a phase of their own.
"""

from __future__ import annotations

import argparse
import sys
import time


def main(argv: list[str] | None = None) -> int:
    started_ns = time.monotonic_ns()
    parser = argparse.ArgumentParser(prog="python -m preload.engine.loading.loader", description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True, help="SOCK_SEQPACKET socket to the daemon")
    options = parser.parse_args(argv)
    from .job import run_job

    return run_job(options.control_fd, started_ns)


if __name__ == "__main__":
    sys.exit(main())
