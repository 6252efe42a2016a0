"""Runs the real frontend with the fake core: run_frontend.py FRONTEND_CONFIG_JSON BEHAVIOUR_JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from preload.engine.errors import PreloadError
from preload.engine.frontend.config import FrontendConfig
from preload.engine.frontend.server import run


def make_command(config: FrontendConfig, standby: bool) -> Callable[[str, int], list[str]]:
    def command(socket_path: str, spawned_at_ns: int) -> list[str]:
        return [
            sys.executable,
            str(Path(__file__).with_name("fake_core.py")),
            f"--socket-path={socket_path}",
            f"--parent-pid={os.getpid()}",
            f"--spawned-at-ns={spawned_at_ns}",
            f"--behaviour={sys.argv[2]}",
            f"--max-model-len={config.max_model_len}",
            *(["--standby"] if standby else []),
        ]

    return command


if __name__ == "__main__":
    try:
        sys.exit(run(FrontendConfig(**json.loads(sys.argv[1])), make_command=make_command))
    except PreloadError as error:
        sys.exit(str(error))
