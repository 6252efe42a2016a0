"""Which GPU is meant. A device is its UUID: indices differ between processes, containers and tools.

"cuda:0" is an index in this process's own view, which CUDA_VISIBLE_DEVICES orders; it becomes a UUID at once and
never leaves the process. The UUID of a MIG instance is a UUID like any other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from preload.engine.errors import DeviceError, RequestError

from .driver import Driver, shared_driver

HOST = "host"
_INDEX = re.compile(r"cuda(?::(\d+))?")
_UUID = re.compile(r"(?:cuda:)?(?:GPU|MIG)-([0-9a-fA-F-]{4,36})")
_FULL_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
EMULATED_NAME = "Preload emulated device"
"""How the name of a device begins whose memory is host memory: the driver that tests emulate has such, a real one
never."""


@dataclass(frozen=True)
class VisibleDevice:
    """A GPU that this process can use. `name` is "cuda:GPU-" and its UUID; `index` is its place in this process's
    view."""

    name: str
    index: int
    product: str
    handle: Any

    @property
    def is_mig(self) -> bool:
        """A part of a GPU, as the driver names it: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"."""
        return " MIG " in self.product

    @property
    def is_emulated(self) -> bool:
        return self.product.startswith(EMULATED_NAME)


def visible_devices(driver: Driver | None = None) -> list[VisibleDevice]:
    """In this process's order. Raises DeviceError without a driver, or if it shows none."""
    driver = driver or shared_driver()
    driver.call("cuInit", 0)
    found = []
    for index in range(driver.call("cuDeviceGetCount")):
        handle = driver.call("cuDeviceGet", index)
        uuid = bytes(driver.call("cuDeviceGetUuid", handle).bytes)
        product = bytes(driver.call("cuDeviceGetName", 256, handle)).split(b"\0")[0].decode(errors="replace")
        found.append(VisibleDevice(device_name(uuid), index, product, handle))
    return found


def device_name(uuid: bytes) -> str:
    """What a device is called everywhere, of its UUID's 16 bytes."""
    text = uuid.hex()
    return "cuda:GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def resolve_device(text: str) -> str:
    """The name of a device as people give it: "host", "cuda", "cuda:1", a UUID ("GPU-…", "MIG-…") or its beginning.

    Raises RequestError if it is no name, DeviceError if there is no such device or no driver to ask."""
    if text in ("", HOST):
        return HOST
    if by_index := _INDEX.fullmatch(text):
        index, devices = int(by_index[1] or 0), visible_devices()
        if index >= len(devices):
            raise DeviceError(f"there is no {text}: this process sees {_listed(devices)}", {"device": text})
        return devices[index].name
    by_uuid = _UUID.fullmatch(text)
    if by_uuid is None:
        raise RequestError(f"unknown device {text!r}; known are host, cuda:<index> and a GPU's UUID (nvidia-smi -L)")
    digits = by_uuid[1].lower()
    if _FULL_UUID.fullmatch(digits):
        return f"cuda:GPU-{digits}"
    devices = visible_devices()
    found = [device.name for device in devices if device.name.startswith(f"cuda:GPU-{digits}")]
    if len(found) != 1:
        raise DeviceError(
            f"{text} is the beginning of {len(found)} devices; this process sees {_listed(devices)}", {"device": text}
        )
    return found[0]


def find_device(name: str) -> VisibleDevice:
    """The device of a resolved name in this process. Raises DeviceError naming what there is."""
    devices = visible_devices()
    for device in devices:
        if device.name == name:
            return device
    raise DeviceError(
        f"this process does not see {name}; it sees {_listed(devices)} (CUDA_VISIBLE_DEVICES and the container's "
        "settings decide that)",
        {"device": name},
    )


def _listed(devices: list[VisibleDevice]) -> str:
    return ", ".join(f"{device.name} ({device.product})" for device in devices) or "none"
