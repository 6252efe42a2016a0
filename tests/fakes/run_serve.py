"""`preload serve` that replaces cores at once however often they die, and whose own cores have failpoints too.

run_serve.py FRONTEND_CONFIG_JSON COMMAND_JSON, the command being what starts a core before its options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from preload.engine.frontend import backoff, core_launch, core_process
from preload.engine.frontend.config import FrontendConfig
from preload.engine.frontend.server import run

start_fresh = core_launch.start_fresh
_CORE = "preload.engine.core"


async def start_with_failpoints(arguments: Sequence[str]) -> core_launch.FreshCore:
    """Where there is no fork to be had, which a slow machine may be the reason of."""
    options = arguments[arguments.index(_CORE) + 1 :]
    return await start_fresh([*json.loads(sys.argv[2]), *options])


if __name__ == "__main__":
    assert backoff._YOUNG_S > 0
    backoff._YOUNG_S = 0.0
    assert core_process.start_fresh is start_fresh
    core_process.start_fresh = start_with_failpoints
    sys.exit(run(FrontendConfig(**json.loads(sys.argv[1]))))
