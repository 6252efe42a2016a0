"""Which kernels a core computes with: native ones if the machine allows it, else plain torch, and never silently."""

from __future__ import annotations

import sys
from functools import cache

import torch

from preload.engine.kernels.native.build import KernelsUnavailableError, find_or_build
from preload.engine.kernels.native.library import NativeLibrary
from preload.engine.layers.native_ops import native_ops
from preload.engine.layers.ops import Ops, TorchOps
from preload.engine.places import kernel_cache_dir, own_dir


@cache
def choose_ops(runtime_dir: str, dtype: torch.dtype, num_threads: int) -> Ops:
    """Operations for a compute dtype, compiled first if neither the loader nor another core has done it. A process's
    models share them, and their threads."""
    try:
        path = find_or_build(kernel_cache_dir(own_dir(runtime_dir)))
        ops = native_ops(NativeLibrary(path, num_threads), dtype)
    except KernelsUnavailableError as error:
        ops = TorchOps(note=f"torch, without native kernels: {error}")
    print(f"preload engine core: kernels: {ops.describe()}", file=sys.stderr, flush=True)
    return ops
