"""`python -m preload.engine.template [--runtime-dir DIR] [--detached]`."""

import sys

from .process import main

if __name__ == "__main__":
    sys.exit(main())
