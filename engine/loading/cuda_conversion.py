"""The GPU that converts weights on their way into its memory, by torch; and when that is not to be had, why.

Owns streams, events and what torch allocates. The segments are mapped by the destination in the same context, so
their addresses are good here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from preload.engine.cuda.devices import HOST, find_device
from preload.engine.cuda.driver import Driver, shared_driver
from preload.engine.errors import DeviceError, NoMemoryError, PreloadError

from .device_conversion import ConversionDevice, Put, Ticket, Work


def choose_device(device: str) -> tuple[ConversionDevice | None, str]:
    """What converts for a load to this device, None for the host's CPUs; and the same in words, with the reason.

    Raises DeviceError if the device is not there."""
    if device in ("", HOST):
        return None, "converted by the CPU because the weights go to the host's memory"
    found = find_device(device)
    if found.is_emulated:
        return None, f"converted by the CPU because {found.name} is emulated"
    if not torch.cuda.is_available():
        return None, f"converted by the CPU because this torch ({torch.__version__}) has no CUDA"
    if found.index >= torch.cuda.device_count():
        return None, f"converted by the CPU because torch does not see {found.name}"
    return CudaConversion(found.index), f"converted on cuda:{found.index} ({found.product})"


class CudaConversion:
    """`ConversionDevice` of torch's device with this index. Raises DeviceError, NoMemoryError."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        with _telling(self._device):
            torch.cuda.reset_peak_memory_stats(self._device)

    def pinned(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=num_bytes > 0)
        except RuntimeError as error:
            raise NoMemoryError(
                f"{num_bytes} bytes of the host's memory could not be pinned for conversion on {self._device} "
                f"({_reason(error)}); free memory of the host, or lower the daemon's --loader-threads",
                {"device": str(self._device)},
            ) from error

    def queue(self) -> CudaQueue:
        with _telling(self._device):
            return CudaQueue(self._device, shared_driver())

    def release(self) -> str:
        with _telling(self._device):
            torch.cuda.synchronize(self._device)
            most = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved(self._device)
        return f"{most >> 20} MiB of transient device memory at most, {left >> 20} MiB left"


class CudaQueue:
    """A stream. What torch allocates under it is used by it alone, so tensors may be forgotten at once."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, stored: Tensor, work: Work, put: Put | None, out: Tensor) -> Ticket:
        try:
            with _telling(self._device), torch.cuda.stream(self._stream):
                return self._submit(stored, work, put, out)
        except BaseException:
            # There is no ticket to wait for what was begun, from `stored` and into segments.
            with suppress(RuntimeError):  # the first error is told
                self._stream.synchronize()
            raise

    def _submit(self, stored: Tensor, work: Work, put: Put | None, out: Tensor) -> Ticket:
        parts, is_good = work(stored.to(self._device, non_blocking=True))
        sizes = [part.numel() for part in parts]
        end = 0
        for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            if put is not None and size:
                to = put(index, size)
                self._driver.call("cuMemcpyDtoDAsync", to, part.data_ptr(), size, self._stream.cuda_stream)
            out[end : end + size].copy_(part, non_blocking=True)
            end += size
        out[end : end + 1].copy_(is_good.reshape(1).view(torch.uint8), non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaTicket(event, sizes, out[end : end + 1], self._device)


class _CudaTicket:
    def __init__(self, event: Any, sizes: list[int], flag: Tensor, device: torch.device) -> None:
        self._event, self._sizes, self._flag, self._device = event, sizes, flag, device

    def wait(self) -> tuple[list[int], bool]:
        with _telling(self._device):
            self._event.synchronize()
        return self._sizes, bool(self._flag[0])


@contextmanager
def _telling(device: torch.device) -> Iterator[None]:
    """Errors of torch leave it as ours."""
    try:
        yield
    except RuntimeError as error:
        raise _told(error, device) from error


def _reason(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _told(error: RuntimeError, device: torch.device) -> PreloadError:
    """An error of torch as ours."""
    reason = _reason(error)
    if isinstance(error, torch.OutOfMemoryError):
        return NoMemoryError(
            f"{device} has no memory left to convert weights in ({reason}); evict generations, or lower the daemon's "
            "--device-limit"
        )
    return DeviceError(
        f"conversion on {device} failed: {reason}; load again, and if it stays so see what nvidia-smi and the "
        "kernel's log say of the device",
        {"device": str(device)},
    )
