"""Memory of a GPU, allocated through the driver's virtual memory management and held as a file descriptor.

The daemon asks the driver for memory and for a descriptor of it, and lets go of the driver's own handle at once. It
creates no context and maps nothing: the functions in `_CALLS` are all that it uses, and none of them needs one. Like
a memfd, the memory lives as long as anybody holds its descriptor or maps it. Unlike a memfd, it cannot be sealed:
who has the descriptor could map it writable. Our client maps it read-only.

cuda-bindings and with it libcuda are loaded when a device is asked for, not before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from preload.daemon.errors import CacheError, DeviceError, NoMemoryError

from .closer import close_later

_CALLS = (
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetUuid",
    "cuDeviceTotalMem",
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemRelease",
)
_HOST_STILL_WORKS = "host memory does without"


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU as the driver describes it. `name` is "cuda:GPU-" and its UUID."""

    name: str
    total_bytes: int
    granularity_bytes: int


class CudaVmmSegment:
    """Owns one descriptor of GPU memory. `size_bytes` is a multiple of the device's granularity."""

    backend = "cuda_vmm"

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes

    def seal(self) -> None:
        """The driver has no seals: the loader's mapping, the only writable one, has ended with the loader."""

    def close(self) -> None:
        """Lets go of the descriptor, in a thread."""
        if self.fd >= 0:
            close_later(self.fd)
            self.fd = -1


class CudaDriver:
    """The driver as far as the daemon uses it. Blocking, and usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: list[Any] = []

    @cached_property
    def _api(self) -> Any:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(
                "no GPU can be used: the package cuda-bindings is not installed beside the daemon (pip install "
                f"'preload-llm[cuda]'); {_HOST_STILL_WORKS}"
            ) from error
        return driver

    @cached_property
    def _ordinals(self) -> dict[str, Any]:
        """Devices that the driver shows to this process, by name."""
        self._call("cuInit", 0)
        found = {}
        for ordinal in range(self._call("cuDeviceGetCount")):
            device = self._call("cuDeviceGet", ordinal)
            found[device_name(bytes(self._call("cuDeviceGetUuid", device).bytes))] = device
        return found

    def describe(self, name: str) -> DeviceInfo:
        """Raises DeviceError if there is no driver, no such device, or one that cannot share its memory."""
        with self._lock:
            device = self._find(name)
            attributes = self._api.CUdevice_attribute
            for attribute, what in (
                (attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "no virtual memory management"),
                (attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "no file descriptors"),
            ):
                if not self._call("cuDeviceGetAttribute", attribute, device):
                    raise DeviceError(f"{name}: its driver offers {what} for device memory", {"device": name})
            return DeviceInfo(
                name,
                int(self._call("cuDeviceTotalMem", device)),
                int(self._call("cuMemGetAllocationGranularity", self._properties(device), self._minimum)),
            )

    def allocate(self, name: str, size_bytes: int) -> CudaVmmSegment:
        """Memory of a device behind a descriptor. Raises NoMemoryError, DeviceError."""
        with self._lock:
            device = self._find(name)
            self._release_handles()  # those that the driver did not take back before
            with self._names_device(name, size_bytes):
                self._handles.append(self._call("cuMemCreate", size_bytes, self._properties(device), 0))
            try:
                fd = int(self._call("cuMemExportToShareableHandle", self._handles[-1], self._fd_type, 0))
            except CacheError:
                with suppress(CacheError):  # the first error is the one to hear of
                    self._release_handles()
                raise
            segment = CudaVmmSegment(fd, size_bytes)
            os.set_inheritable(fd, False)
            try:
                self._release_handles()
            except CacheError:
                segment.close()
                raise
            return segment

    def _release_handles(self) -> None:
        """Descriptors are all that keeps memory. A handle whose release fails is tried again with the next one."""
        while self._handles:
            self._call("cuMemRelease", self._handles[-1])
            self._handles.pop()

    def _find(self, name: str) -> Any:
        device = self._ordinals.get(name)
        if device is None:
            known = ", ".join(self._ordinals) or "none"
            raise DeviceError(
                f"the daemon's driver shows no device {name}; it shows {known} (CUDA_VISIBLE_DEVICES of the daemon "
                "limits that)",
                {"device": name},
            )
        return device

    @property
    def _minimum(self) -> Any:
        return self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM

    @property
    def _fd_type(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, device: Any) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._fd_type
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(device)
        return properties

    @contextmanager
    def _names_device(self, name: str, size_bytes: int) -> Iterator[None]:
        try:
            yield
        except NoMemoryError as error:
            fields = {"device": name, "needed_bytes": str(size_bytes)}
            raise NoMemoryError(
                f"{name}: a segment of {size_bytes:,} bytes does not fit into what others leave of the device "
                f"({error.message})",
                fields,
            ) from error

    def _call(self, name: str, *arguments: Any) -> Any:
        """The value of a driver call. Raises NoMemoryError, DeviceError."""
        assert name in _CALLS
        try:
            status, *values = getattr(self._api, name)(*arguments)
        except RuntimeError as error:  # how cuda-bindings says that there is no library, or no such function in it
            raise DeviceError(
                f"no GPU can be used: {name} is not there, because no NVIDIA driver (libcuda.so.1) is installed, or "
                f"an old one; {_HOST_STILL_WORKS} ({_first_line(error)})"
            ) from error
        if int(status) != 0:
            raise self._refused(name, status)
        return values[0] if values else None

    def _refused(self, name: str, status: Any) -> CacheError:
        results = self._api.CUresult
        known = results(int(status)).name if int(status) in set(results) else f"error {int(status)}"
        if status == results.CUDA_ERROR_OUT_OF_MEMORY:
            return NoMemoryError(f"{name}: {known}")
        if status == results.CUDA_ERROR_NO_DEVICE:
            return DeviceError(f"no GPU can be used: the driver shows none to the daemon ({known})")
        return DeviceError(f"{name} failed with {known}; a restart of the daemon asks the driver afresh")


def device_name(uuid: bytes) -> str:
    """What a device is called everywhere: its UUID, of 16 bytes, as nvidia-smi writes it."""
    text = uuid.hex()
    return "cuda:GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
