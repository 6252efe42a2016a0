"""Where processes of one host find each other. Standard library only: a frontend asks before it imports anything."""

from __future__ import annotations

import os
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""What Linux allows in the address of a Unix socket."""


def kernel_cache_dir(runtime_dir: str) -> Path:
    """Compiled kernels, made by the loader or by the first core that misses them."""
    return Path(runtime_dir) / "kernels"


def default_runtime_dir() -> str:
    """/run/preload for root, the user's runtime folder otherwise: where a daemon serves unless told otherwise."""
    if os.geteuid() == 0:
        return "/run/preload"
    return str(Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")) / "preload")
