"""Has every daemon of a test run keep on an emulated GPU what it is asked to keep on the host.

So tests that name no device run on one: see `--on` in tests/conftest.py. Python imports this at its start, wherever
the folder is on PYTHONPATH; nothing is changed but three modules of the daemon, when they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

BACKEND, _, DEVICE = os.environ.get("FAKE_CUDA_ON", "").partition("=")


def _change_wire(wire: Any) -> None:
    checked = wire.checked_name
    wire.checked_name = lambda name: DEVICE if name == "host" else checked(name)


def _change_config(config: Any) -> None:
    """Models of a configuration are on the device, and limits of the host's memory are the device's."""
    config.HOST = DEVICE


def _change_cache(cache: Any) -> None:
    class Devices(cache.Devices):  # type: ignore[misc]
        """Knows the device from the start, as it knows the host."""

        def __init__(self, host_limit: str, device_limit: str, holders: Any, device_memory: str) -> None:
            super().__init__("80%", host_limit if host_limit != "80%" else "95%", holders, BACKEND)
            self.adopt(self._memory.describe(DEVICE))

        def limit(self, host_limit: str, device_limit: str) -> None:
            super().limit("80%", host_limit)

    cache.Devices = Devices


_CHANGES: dict[str, Callable[[Any], None]] = {
    "preload.daemon.wire": _change_wire,
    "preload.daemon.config": _change_config,
    "preload.daemon.cache": _change_cache,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find a module of the table, and changes it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if DEVICE:
    sys.meta_path.insert(0, _Finder())
