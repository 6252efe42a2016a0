"""`python -m preload.engine.core --config-json '<CoreConfig>'`: notes the time before it imports anything."""

import time

_FIRST_LINE_NS = time.monotonic_ns()

import sys  # noqa: E402

from .process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(_FIRST_LINE_NS))
