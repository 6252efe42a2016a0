"""Which kernels a core computes with, and never silently: on a GPU Triton's; on the host the native ones if the
machine allows it, else plain torch; over an emulated GPU's memory plain torch, whatever the host could do."""

from __future__ import annotations

import sys
from functools import cache

import torch

from preload.engine.errors import DeviceError, RequestError
from preload.engine.kernels.native.build import KernelsUnavailableError, find_or_build
from preload.engine.kernels.native.library import EXACT_UNITS, UNITS, NativeLibrary
from preload.engine.layers.native_ops import native_ops
from preload.engine.layers.ops import Ops, TorchOps, check_cache_dtype
from preload.engine.places import kernel_cache_dir, own_dir

from .placement import Placement

EMULATED_NOTE = "torch, by the host over the memory of an emulated device"


def ops_on(
    placement: Placement,
    runtime_dir: str,
    dtype: torch.dtype,
    num_threads: int,
    attention_backend: str = "triton",
    matmul_precision: str = "highest",
    kv_cache_dtype: str = "auto",
) -> Ops:
    """Operations for where a core's weights are. `attention_backend`: of a GPU; `matmul_precision`: of a CPU, and
    there `kv_cache_dtype` may differ from the compute dtype.

    Raises DeviceError if a GPU's kernels cannot be had, RequestError for what is of no use here."""
    if matmul_precision != "highest" and (placement.device.type != "cpu" or placement.is_emulated):
        raise RequestError(
            f"matmul_precision {matmul_precision} is for a CPU, and the weights are in a device's memory"
        )
    if attention_backend != "triton" and placement.device.type != "cuda":
        where = "an emulated device" if placement.is_emulated else "host memory"
        raise RequestError(f"attention_backend {attention_backend} computes on a GPU, and the weights are in {where}")
    if placement.device.type == "cpu" and not placement.is_emulated:
        return choose_ops(runtime_dir, dtype, num_threads, matmul_precision, kv_cache_dtype)
    check_cache_dtype(kv_cache_dtype, dtype)
    if placement.device.type == "cuda":
        return _gpu_ops(placement.device, runtime_dir, dtype, attention_backend)
    return TorchOps(note=EMULATED_NOTE)


def _gpu_ops(device: torch.device, runtime_dir: str, dtype: torch.dtype, attention_backend: str) -> Ops:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise DeviceError(
            "weights in a GPU's memory are computed by Triton, and the package triton is not installed "
            "(pip install 'preload-llm[cuda]')"
        ) from error
    from preload.engine.kernels.triton.cache import use_cache
    from preload.engine.layers.triton_ops import TritonOps

    major, minor = torch.cuda.get_device_capability(device)
    use_cache(kernel_cache_dir(own_dir(runtime_dir)), 10 * major + minor)
    if attention_backend == "flashinfer":
        from preload.engine.layers.flashinfer_ops import FlashInferOps, load_flashinfer

        return FlashInferOps(device, dtype, load_flashinfer())
    return TritonOps(device, dtype)


@cache
def choose_ops(
    runtime_dir: str,
    dtype: torch.dtype,
    num_threads: int,
    matmul_precision: str = "highest",
    kv_cache_dtype: str = "auto",
) -> Ops:
    """Operations for a compute dtype, compiled first if neither the loader nor another core has done it. A process's
    models share them, and their threads. Raises RequestError for keys and values that nothing here computes with."""
    try:
        path = find_or_build(kernel_cache_dir(own_dir(runtime_dir)))
        units = UNITS if matmul_precision == "medium" else EXACT_UNITS
        library = NativeLibrary(path, num_threads, units)
    except KernelsUnavailableError as error:
        check_cache_dtype(kv_cache_dtype, dtype)
        return TorchOps(note=f"torch, without native kernels: {error}")
    if "bfloat16" in units and "bfloat16" not in library.units:
        print("preload engine core: this CPU multiplies no bfloat16: precision is highest", file=sys.stderr)
    return native_ops(library, dtype, kv_cache_dtype)
