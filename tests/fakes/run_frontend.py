"""Runs the real frontend with the fake core: run_frontend.py FRONTEND_CONFIG_JSON BEHAVIOUR_JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from preload.engine.frontend.config import FrontendConfig
from preload.engine.frontend.server import run


def command(socket_path: str, spawned_at_ns: int) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).with_name("fake_core.py")),
        f"--socket-path={socket_path}",
        f"--parent-pid={os.getpid()}",
        f"--spawned-at-ns={spawned_at_ns}",
        f"--behaviour={sys.argv[2]}",
    ]


if __name__ == "__main__":
    sys.exit(run(FrontendConfig(**json.loads(sys.argv[1])), core_command=command))
