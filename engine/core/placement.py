"""Where a core computes and keeps its keys and values: beside its weights, wherever those are resident.

    host       torch's own memory, and the host's numbers
    a GPU      torch on that GPU, and the driver's numbers; a build of torch with CUDA is needed
    emulated   a GPU's memory that the tests' driver lends out of the host's: keys and values are allocated through
               the driver, like on a GPU, and the host computes in place

Owns no weight and decides nothing about sizes: that is memory.py's and sizing.py's.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from preload.engine.cuda.context import DeviceContext
from preload.engine.cuda.devices import HOST, VisibleDevice, find_device
from preload.engine.errors import CoreError, PreloadError

from .kv_cache import empty_on_host
from .memory import MemoryProfile, measure_peak, take_profile


class Placement(Protocol):
    """`device`: where a step is computed; `is_emulated`: whether that stands for a GPU that is not there."""

    device: torch.device
    is_emulated: bool

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for keys and values, [layers, 2, num_blocks, …], not initialized, in an order of its own.

        Raises CoreError if there is not that much."""

    def profile(self, weights_bytes: int, peak_bytes: int | None) -> MemoryProfile:
        """What there is and what is taken, now."""

    def measure_peak(self, work: Callable[[], None]) -> int:
        """Bytes that `work` takes at most, beyond what is taken now."""


class HostPlacement:
    device = torch.device("cpu")
    is_emulated = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        try:
            return empty_on_host(shape, dtype)
        except OSError as error:
            raise CoreError(_too_much(shape, dtype, "the host", str(error))) from error

    def profile(self, weights_bytes: int, peak_bytes: int | None) -> MemoryProfile:
        return take_profile(weights_bytes, peak_bytes)

    def measure_peak(self, work: Callable[[], None]) -> int:
        return measure_peak(work)


class CudaPlacement:
    """On a real GPU. What the daemon holds is used memory to the driver, so weights count once."""

    is_emulated = False

    def __init__(self, found: VisibleDevice) -> None:
        self.device = torch.device("cuda", found.index)
        torch.cuda.set_device(self.device)  # Triton launches on the current one

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise CoreError(_too_much(shape, dtype, str(self.device), str(error))) from error

    def profile(self, weights_bytes: int, peak_bytes: int | None) -> MemoryProfile:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        reserved_bytes = torch.cuda.memory_reserved(self.device)
        unused_bytes = reserved_bytes - torch.cuda.memory_allocated(self.device)
        return MemoryProfile(
            total_bytes=total_bytes,
            available_bytes=free_bytes + unused_bytes,
            weights_bytes=weights_bytes,
            core_bytes=reserved_bytes - unused_bytes,
            peak_bytes=peak_bytes,
        )

    def measure_peak(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return max(0, torch.cuda.max_memory_allocated(self.device) - before)


class EmulatedPlacement:
    """Memory of the emulated driver by the host's own addresses."""

    device = torch.device("cpu")
    is_emulated = True

    def __init__(self, name: str) -> None:
        self._context = DeviceContext(name)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        self._context.make_current()
        try:
            address = int(self._context.driver.call("cuMemAlloc", num_bytes))
        except PreloadError as error:
            raise CoreError(_too_much(shape, dtype, self._context.device.name, error.message)) from error
        memory: Any = (ctypes.c_ubyte * num_bytes).from_address(address)
        memory.keeps = self  # the context, as long as anybody looks at the memory
        weakref.finalize(memory, self._context.driver.call, "cuMemFree", address).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))

    def profile(self, weights_bytes: int, peak_bytes: int | None) -> MemoryProfile:
        self._context.make_current()
        free_bytes, total_bytes = self._context.driver.call("cuMemGetInfo")
        return MemoryProfile(
            total_bytes=int(total_bytes),
            available_bytes=int(free_bytes),
            weights_bytes=weights_bytes,
            core_bytes=0,
            peak_bytes=peak_bytes,
        )

    def measure_peak(self, work: Callable[[], None]) -> int:
        """The host computes: nothing of the device's is taken."""
        work()
        return 0


def placement_of(device: str) -> Placement:
    """For the device of an attachment: "host" or a GPU's name. Raises DeviceError if it is not there."""
    if device in ("", HOST):
        return HostPlacement()
    found = find_device(device)
    return EmulatedPlacement(found.name) if found.is_emulated else CudaPlacement(found)


def _too_much(shape: Sequence[int], dtype: torch.dtype, where: str, reason: str) -> str:
    num_bytes = math.prod(shape) * dtype.itemsize
    return f"{where} has no {num_bytes} bytes for the KV cache: {reason}; lower kv_cache_bytes or memory_utilization"
