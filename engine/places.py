"""Where processes of one host find each other. Standard library only: a frontend asks before it imports anything."""

from __future__ import annotations

import os
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""What Linux allows in the address of a Unix socket."""


def kernel_cache_dir(runtime_dir: str) -> Path:
    """Compiled kernels, made by the loader or by the first core that misses them."""
    return Path(runtime_dir) / "kernels"


def own_dir(runtime_dir: str | None) -> str:
    """Where this user keeps files of its own beside the daemon of a runtime folder: in that folder; or, if it is
    another user's, who let us in to its sockets and no further, in the folder of our own daemon, had we one."""
    path = runtime_dir or default_runtime_dir()
    is_others = os.path.isdir(path) and not os.access(path, os.W_OK | os.X_OK, effective_ids=True)
    return default_runtime_dir() if is_others else path


def default_runtime_dir() -> str:
    """/run/preload for root, the user's runtime folder otherwise: where a daemon serves unless told otherwise."""
    if os.geteuid() == 0:
        return "/run/preload"
    return str(Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")) / "preload")


def living_folder() -> str:
    """Where a new process is to start: in our own folder, or at the root if that was removed. There is no name for it
    then, nothing can be found from it, and libraries (oneMKL) refuse to load."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
