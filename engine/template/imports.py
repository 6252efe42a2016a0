"""Everything a core imports, imported without starting a thread."""

from __future__ import annotations

import os
import pkgutil
from importlib import import_module

_PACKAGES = ("client", "core", "kernels", "layers", "models", "quantization")
"""What a core is made of, below preload.engine."""
_IMPORTED_BY_GRPC_WHEN_USED = ("grpc._channel", "grpc._server", "grpc.experimental")


def import_all() -> None:
    """All modules that a core needs until its first token, so that a forked one imports nothing.

    Only imports: a tensor operation could start OpenMP's threads, and a channel gRPC's."""
    # Both are read once, when the library is loaded. See process.run of the core for the first; the second keeps
    # numpy's OpenBLAS, which the core does not use, from starting a pool of threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in ("torch", *_IMPORTED_BY_GRPC_WHEN_USED):
        import_module(name)
    for name in _PACKAGES:
        package = import_module(f"preload.engine.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                import_module(module.name)
    del os.environ["OPENBLAS_NUM_THREADS"]


def num_threads() -> int:
    """Threads of this process, as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))
