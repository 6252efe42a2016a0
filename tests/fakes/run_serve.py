"""`preload serve` that replaces cores at once however often they die: run_serve.py FRONTEND_CONFIG_JSON."""

from __future__ import annotations

import json
import sys

from preload.engine.frontend import backoff
from preload.engine.frontend.config import FrontendConfig
from preload.engine.frontend.server import run

if __name__ == "__main__":
    assert backoff._YOUNG_S > 0
    backoff._YOUNG_S = 0.0
    sys.exit(run(FrontendConfig(**json.loads(sys.argv[1]))))
