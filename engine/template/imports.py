"""Everything a core imports, imported without starting a thread."""

from __future__ import annotations

import os
from importlib import import_module

_MODULES = (
    "torch",
    "preload.engine.client",
    "preload.engine.core.core",
    "preload.engine.core.process",
    "preload.engine.core.server",
    "preload.engine.models.decoder",
)
"""With all that these import themselves; the test of this module says which a core needs besides."""


def import_all() -> None:
    """All modules that a core needs until its first token, so that a forked one imports nothing.

    Only imports: a tensor operation could start OpenMP's threads, and a channel gRPC's."""
    # Both are read once, when the library is loaded. See process.run of the core for the first; the second keeps
    # numpy's OpenBLAS, which the core does not use, from starting a pool of threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in _MODULES:
        import_module(name)
    del os.environ["OPENBLAS_NUM_THREADS"]


def num_threads() -> int:
    """Threads of this process, as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))
