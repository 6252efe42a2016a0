"""The CUDA driver behind typed errors. Owns no device, no context and no memory.

cuda-bindings and libcuda are loaded by the first call, never by an import of this module: a process that forks, or
that has nothing to do with a GPU, must not have them.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, cached_property
from typing import Any

from preload.engine.errors import DeviceError, NoMemoryError, PreloadError


class Driver:
    """Calls by name. `calls` counts them, for whoever measures."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @cached_property
    def api(self) -> Any:
        """The module cuda.bindings.driver. Raises DeviceError if the package is not installed."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(
                "no GPU can be used: the package cuda-bindings is not installed (pip install 'preload-llm[cuda]'); "
                "host memory does without"
            ) from error
        return driver

    def call(self, name: str, *arguments: Any) -> Any:
        """The value of a driver call, or a tuple of its values. Raises DeviceError, and NoMemoryError when the device
        has none left."""
        function = getattr(self.api, name)
        self.calls[name] += 1
        try:
            status, *values = function(*arguments)
        except RuntimeError as error:  # how cuda-bindings says that there is no library, or no such function in it
            reason = str(error).partition("\n")[0]
            raise DeviceError(
                f"no GPU can be used: {name} is not there, because no NVIDIA driver (libcuda.so.1) is installed, or "
                f"an old one; host memory does without ({reason})"
            ) from error
        if int(status) != 0:
            raise self._refused(name, status)
        return values[0] if len(values) == 1 else tuple(values)

    def _refused(self, name: str, status: Any) -> PreloadError:
        results = self.api.CUresult
        known = results(int(status)).name if int(status) in set(results) else f"error {int(status)}"
        if status == results.CUDA_ERROR_OUT_OF_MEMORY:
            return NoMemoryError(f"{name} failed with {known}: the device has no memory left", {"call": name})
        if status == results.CUDA_ERROR_NO_DEVICE:
            return DeviceError(
                "no GPU can be used: the driver shows none to this process, which CUDA_VISIBLE_DEVICES or the "
                f"container's settings decide ({known})"
            )
        return DeviceError(f"{name} failed with {known}", {"call": name, "status": known})


@cache
def shared_driver() -> Driver:
    """The driver as this process shares it. A forked child must not have called it before the fork."""
    return Driver()
