"""Memory of a GPU, allocated through the driver's virtual memory management and held as a file descriptor.

The daemon asks the driver for memory and for a descriptor of it, and lets go of the driver's own handle at once. It
creates no context and maps nothing: the functions in `_CALLS` are all that it uses, and none of them needs one. Like
a memfd, the memory lives as long as anybody holds its descriptor or maps it. Unlike a memfd, it cannot be sealed:
who has the descriptor could map it writable. Our client maps it read-only.

Where the device has fabric handles, each segment gets one as well: 64 bytes that an importer without the hand-over
socket uses in place of the descriptor. They keep nothing alive.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from contextlib import suppress
from typing import Any

from preload.daemon.errors import CacheError, DeviceError, NoMemoryError

from .closer import close_later
from .driver import DeviceInfo, Driver, no_room

log = logging.getLogger(__name__)

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


_HANDLE_TYPES_OFFSET = 4
"""Of requestedHandleTypes in CUmemAllocationProp."""


class CudaVmmSegment:
    """Owns one descriptor of GPU memory. `size_bytes` is a multiple of the device's granularity; `handle` is its
    fabric handle, if it has one."""

    backend = "cuda_vmm"
    dies_with_us = False

    def __init__(self, fd: int, size_bytes: int, handle: bytes = b"") -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.handle = handle

    def seal(self) -> None:
        """The driver has no seals: the loader's mapping, the only writable one, has ended with the loader."""

    def close(self) -> None:
        """Lets go of the descriptor, in a thread."""
        if self.fd >= 0:
            close_later(self.fd)
            self.fd = -1


class CudaVmm:
    """Virtual memory management, as far as the daemon uses it. Blocking, and usable from any thread."""

    def __init__(self) -> None:
        self._driver = Driver(_CALLS)
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._without_fabric: set[str] = set()

    def describe(self, name: str) -> DeviceInfo:
        """Raises DeviceError if there is no driver, no such device, or one that cannot share its memory."""
        with self._lock:
            device = self._driver.find(name)
            attributes = self._driver.api.CUdevice_attribute
            for attribute, what in (
                (attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "no virtual memory management"),
                (attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "no file descriptors"),
            ):
                if not self._driver.call("cuDeviceGetAttribute", attribute, device):
                    raise DeviceError(
                        f"{name}: its driver offers {what} for device memory; --device-memory cuda_ipc does without",
                        {"device": name},
                    )
            properties = self._properties(device, has_fabric=False)
            return DeviceInfo(
                name,
                int(self._driver.call("cuDeviceTotalMem", device)),
                int(self._driver.call("cuMemGetAllocationGranularity", properties, self._minimum)),
            )

    def allocate(self, name: str, size_bytes: int) -> CudaVmmSegment:
        """Memory of a device behind a descriptor. Raises NoMemoryError, DeviceError."""
        with self._lock:
            device = self._driver.find(name)
            self._release_handles()  # those that the driver did not take back before
            fabric = self._create(name, device, size_bytes)
            try:
                fd = int(self._export(self._fd_type))
            except CacheError:
                with suppress(CacheError):  # the first error is the one to hear of
                    self._release_handles()
                raise
            segment = CudaVmmSegment(fd, size_bytes)
            os.set_inheritable(fd, False)
            try:
                if fabric:
                    segment.handle = bytes(self._export(self._fabric_type).data)
                self._release_handles()
            except CacheError:
                segment.close()
                with suppress(CacheError):
                    self._release_handles()
                raise
            return segment

    def _create(self, name: str, device: Any, size_bytes: int) -> bool:
        """Allocates, and says whether the memory has a fabric handle as well."""
        has_fabric = name not in self._without_fabric and self._can_fabric(device)
        properties = self._properties(device, has_fabric)
        try:
            self._handles.append(self._driver.call("cuMemCreate", size_bytes, properties, 0))
        except NoMemoryError as error:
            raise no_room(name, size_bytes, error) from error
        except DeviceError as error:
            # The device could, but nobody set up its fabric (IMEX channels): descriptors are enough for this host.
            if not has_fabric or not _is_refusal(error):
                raise
            log.warning("%s has no fabric handles here: %s", name, error.message)
            self._without_fabric.add(name)
            return self._create(name, device, size_bytes)
        return has_fabric

    def _can_fabric(self, device: Any) -> bool:
        attribute = self._driver.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        return bool(self._driver.call("cuDeviceGetAttribute", attribute, device))

    def _export(self, kind: Any) -> Any:
        return self._driver.call("cuMemExportToShareableHandle", self._handles[-1], kind, 0)

    def _release_handles(self) -> None:
        """Descriptors are all that keeps memory. A handle whose release fails is tried again with the next one."""
        while self._handles:
            self._driver.call("cuMemRelease", self._handles[-1])
            self._handles.pop()

    @property
    def _minimum(self) -> Any:
        return self._driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM

    @property
    def _fd_type(self) -> Any:
        return self._driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    @property
    def _fabric_type(self) -> Any:
        return self._driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC

    def _properties(self, device: Any, has_fabric: bool) -> Any:
        api = self._driver.api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._fd_type
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(device)
        if has_fabric:  # a set of flags, for which cuda-bindings has no value
            field = ctypes.c_int.from_address(properties.getPtr() + _HANDLE_TYPES_OFFSET)
            field.value = int(self._fd_type) | int(self._fabric_type)
        return properties


def _is_refusal(error: DeviceError) -> bool:
    return any(name in error.message for name in ("NOT_PERMITTED", "NOT_SUPPORTED"))
