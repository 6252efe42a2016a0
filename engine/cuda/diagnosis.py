"""What is missing for this process to use memory of a device, in words that say what to do: for `preload check`.

Every error has a field "cause": no_driver, no_device, mig, no_vmm, no_fd, pid_namespace, ipc_namespace, ipc_blocked,
no_context or no_memory. Nothing here is on the way of an attach.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from preload.engine.errors import DeviceError, NoMemoryError

from .devices import VisibleDevice, find_device, visible_devices
from .driver import shared_driver
from .mapping import CUDA_IPC


def require_visible(name: str) -> VisibleDevice:
    """The device, if this process has a driver and sees it. Raises DeviceError."""
    try:
        devices = visible_devices()
    except DeviceError as error:
        cause = "no_device" if "shows none" in error.message else "no_driver"
        raise DeviceError(error.message, {**error.fields, "cause": cause}) from error
    try:
        return find_device(name)
    except DeviceError as error:
        if any(device.is_mig for device in devices):
            raise DeviceError(
                f"{error.message}; a process sees one MIG instance at most, and memory of another one, or of the "
                "whole GPU, cannot be shared with it: give it the instance on which the weights are",
                {**error.fields, "cause": "mig"},
            ) from error
        raise DeviceError(error.message, {**error.fields, "cause": "no_device"}) from error


def require_usable(name: str, backend: str = "") -> None:
    """Whether this process could map memory of a device that is shared like that. Raises DeviceError.

    Creates no context, so it cannot tell whether there is room for one."""
    device, driver = require_visible(name), shared_driver()
    if backend == CUDA_IPC:
        return
    attributes = driver.api.CUdevice_attribute
    for attribute, what, cause in (
        (attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management", "no_vmm"),
        (attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "file descriptors", "no_fd"),
    ):
        if not driver.call("cuDeviceGetAttribute", attribute, device.handle):
            raise DeviceError(
                f"{name} ({device.product}): its driver offers no {what} for device memory; a daemon with "
                "--device-memory cuda_ipc does without",
                {"device": name, "cause": cause},
            )


@contextmanager
def explained(name: str, pid_namespace: int, ipc_namespace: int) -> Iterator[None]:
    """Around an attempt to map memory of a device: its errors say more, given the daemon's namespaces (0: unknown).

    Raises DeviceError, NoMemoryError."""
    try:
        yield
    except NoMemoryError as error:
        in_context = error.fields.get("call") == "cuDevicePrimaryCtxRetain"
        what, cause = ("a context", "no_context") if in_context else ("mapping the weights", "no_memory")
        raise NoMemoryError(
            f"{name} has no memory left for {what} of this process ({error.message}): evict generations, lower the "
            "daemon's --device-limit, or end what else uses the device",
            {**error.fields, "device": name, "cause": cause},
        ) from error
    except DeviceError as error:
        for kind, theirs, option in (("pid", pid_namespace, "--pid"), ("ipc", ipc_namespace, "--ipc")):
            if error.fields.get("cause") == "ipc_blocked" and theirs not in (0, _namespace(kind)):
                raise DeviceError(
                    f"{error.message}. This process is in another {kind.upper()} namespace than the daemon and its "
                    f"holder: run the container with {option}=host, or with theirs",
                    {**error.fields, "cause": f"{kind}_namespace"},
                ) from error
        raise


def _namespace(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino
