"""The CUDA driver behind typed errors, for the daemon and its holders. Owns no context and no memory.

cuda-bindings and with it libcuda are loaded when a device is asked for, not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from preload.daemon.errors import CacheError, DeviceError, NoMemoryError

_HOST_STILL_WORKS = "host memory does without"


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU as the driver describes it. `name` is "cuda:GPU-" and its UUID."""

    name: str
    total_bytes: int
    granularity_bytes: int


class Driver:
    """Calls by name. Blocking, and usable from any thread. `whose` is the process that a restart of would help."""

    def __init__(self, calls: tuple[str, ...], whose: str = "the daemon") -> None:
        self._calls = frozenset(calls)
        self._whose = whose

    @cached_property
    def api(self) -> Any:
        """The module cuda.bindings.driver. Raises DeviceError if the package is not installed."""
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
        self.call("cuInit", 0)
        found = {}
        for ordinal in range(self.call("cuDeviceGetCount")):
            device = self.call("cuDeviceGet", ordinal)
            found[device_name(bytes(self.call("cuDeviceGetUuid", device).bytes))] = device
        return found

    def find(self, name: str) -> Any:
        """The driver's handle of a device. Raises DeviceError naming those that there are."""
        device = self._ordinals.get(name)
        if device is None:
            known = ", ".join(self._ordinals) or "none"
            raise DeviceError(
                f"the daemon's driver shows no device {name}; it shows {known} (CUDA_VISIBLE_DEVICES of the daemon "
                "limits that)",
                {"device": name},
            )
        return device

    def call(self, name: str, *arguments: Any) -> Any:
        """The value of a driver call. Raises NoMemoryError, DeviceError."""
        assert name in self._calls, name
        try:
            status, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as error:  # how cuda-bindings says that there is no library, or no such function in it
            raise DeviceError(
                f"no GPU can be used: {name} is not there, because no NVIDIA driver (libcuda.so.1) is installed, or "
                f"an old one; {_HOST_STILL_WORKS} ({_first_line(error)})"
            ) from error
        if int(status) != 0:
            raise self._refused(name, status)
        return values[0] if values else None

    def _refused(self, name: str, status: Any) -> CacheError:
        results = self.api.CUresult
        known = results(int(status)).name if int(status) in set(results) else f"error {int(status)}"
        if status == results.CUDA_ERROR_OUT_OF_MEMORY:
            return NoMemoryError(f"{name}: {known}")
        if status == results.CUDA_ERROR_NO_DEVICE:
            return DeviceError(f"no GPU can be used: the driver shows none to the daemon ({known})")
        return DeviceError(f"{name} failed with {known}; a restart of {self._whose} asks the driver afresh")


def no_room(name: str, size_bytes: int, cause: NoMemoryError) -> NoMemoryError:
    """What a device lacks for a segment."""
    return NoMemoryError(
        f"{name}: a segment of {size_bytes:,} bytes does not fit into what others leave of the device "
        f"({cause.message})",
        {"device": name, "needed_bytes": str(size_bytes)},
    )


def device_name(uuid: bytes) -> str:
    """What a device is called everywhere: its UUID, of 16 bytes, as nvidia-smi writes it."""
    text = uuid.hex()
    return "cuda:GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
