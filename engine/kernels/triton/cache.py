"""Where compiled kernels are kept: beside the weights, so that a restarted core compiles nothing.

One folder for each thing that compiled code depends on and that Triton may not have in its own keys: the sources of
this package, the version of Triton and the target. Within it Triton keys by kernel, types, constants and options.
Folders of other sources for the same target are of no use to anybody who runs this code, but may be to one who runs
another version beside it: they are removed when they have not been used for a month.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from functools import cache
from pathlib import Path

import triton

_STALE_S = 30 * 24 * 3600


@cache
def source_digest() -> str:
    """Of all sources of this package."""
    hasher = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


def cache_folder(root: Path, capability: int) -> Path:
    """For a target's compute capability · 10."""
    return root / f"triton-{triton.__version__}-sm_{capability}-{source_digest()}"


def use_cache(root: Path, capability: int) -> Path:
    """This process's kernels are compiled into, and found in, that folder from now on."""
    folder = cache_folder(root, capability)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(folder)
    for other in root.glob(f"triton-*-sm_{capability}-*"):
        if other != folder and time.time() - other.stat().st_mtime > _STALE_S:
            shutil.rmtree(other, ignore_errors=True)
    triton.knobs.cache.dir = str(folder)
    return folder
