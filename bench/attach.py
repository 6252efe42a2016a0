"""How long attaching takes: from connecting to every tensor bound, by size and by number of tensors.

Every attach is complete: a new connection, a lease, the descriptors, the mappings and all torch tensors; torch is
imported before the first. The two synthetic sizes are measured in turn, so that the machine's drift meets both.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from preload.engine.client import attach
from preload.engine.cuda.devices import resolve_device
from preload.engine.cuda.driver import shared_driver
from preload.engine.recipe import Recipe

from .processes import PrivateDaemon, tell
from .statistics import machine, summary_ms
from .synthetic import write_synthetic

GIB = 1 << 30
RAW = Recipe(model="raw")
_SIZED_TENSORS = 256


def run(checkpoint: str, num_attaches: int = 50) -> dict[str, Any]:
    """Figures in milliseconds, of the real model, of 1 GiB against 8 GiB, and of 10,000 tensors."""
    import torch

    torch.set_num_threads(1)
    with PrivateDaemon("--host-limit", "95%") as daemon:
        small = write_synthetic(daemon.folder / "1GiB.safetensors", _SIZED_TENSORS, GIB // _SIZED_TENSORS)
        large = write_synthetic(daemon.folder / "8GiB.safetensors", _SIZED_TENSORS, 8 * GIB // _SIZED_TENSORS)
        many = write_synthetic(daemon.folder / "10000.safetensors", 10_000, 4096)
        targets = [(checkpoint, Recipe()), (str(many), RAW), (str(small), RAW), (str(large), RAW)]
        for path, recipe in targets:
            tell(f"loading {Path(path).name}")
            _load(daemon, path, recipe)
        tell(f"attaching {num_attaches} times to each")
        real, tensors_10000 = (_measure(daemon, [target], num_attaches)[0] for target in targets[:2])
        size_1, size_8 = _measure(daemon, targets[2:], num_attaches)
    return {
        "machine": machine(),
        "real_model": {"checkpoint": Path(checkpoint).name, **summary_ms(real)},
        "synthetic_1_gib": summary_ms(size_1),
        "synthetic_8_gib": summary_ms(size_8),
        "size_ratio": round(summary_ms(size_8)["p50_ms"] / summary_ms(size_1)["p50_ms"], 3),
        "tensors_10000": summary_ms(tensors_10000),
    }


_NUM_TENSORS = (10, 1000, 10_000)


def run_device(device: str, num_attaches: int = 50, device_memory: str = "cuda_vmm") -> dict[str, Any]:
    """Driver calls and milliseconds of an attach to memory of a GPU, by number of tensors.

    `device_memory` is how it is shared: "cuda_vmm" or "cuda_ipc". Calls are those of mapping and unmapping. Tensors
    are arrays of device memory: binding them to torch is what the host's figures show."""
    name = resolve_device(device)
    calls, by_tensors = shared_driver().calls, {}
    with PrivateDaemon("--device-limit", "95%", "--device-memory", device_memory) as daemon:
        for num_tensors in _NUM_TENSORS:
            path = write_synthetic(daemon.folder / f"{num_tensors}.safetensors", num_tensors, 4096)
            tell(f"loading {num_tensors} tensors on {name}")
            _load(daemon, str(path), RAW, name)
            before = sum(calls.values())
            (seconds,) = _measure(daemon, [(str(path), RAW)], num_attaches, device=name, tensors="device")
            made = (sum(calls.values()) - before) / (num_attaches + 1)
            by_tensors[str(num_tensors)] = {"driver_calls": made, **summary_ms(seconds)}
    return {"machine": machine(), "device": name, "device_memory": device_memory, "by_tensors": by_tensors}


def _load(daemon: PrivateDaemon, path: str, recipe: Recipe, device: str = "host") -> None:
    with daemon.control() as control:
        for _ in control.load(path, recipe, device=device):
            pass


def _measure(
    daemon: PrivateDaemon, targets: list[tuple[str, Recipe]], num_attaches: int, **options: Any
) -> list[list[float]]:
    """Seconds of each attach, the targets in turn; the first round is a warm-up and does not count."""
    seconds: list[list[float]] = [[] for _ in targets]
    for round_number in range(num_attaches + 1):
        for (path, recipe), taken in zip(targets, seconds, strict=True):
            start_s = time.perf_counter()
            attachment = attach(path, recipe=recipe, runtime_dir=daemon.runtime_dir, **options)
            elapsed_s = time.perf_counter() - start_s
            attachment.close()
            del attachment  # ten thousand tensors take their time to be freed: not in the next one's time
            if round_number:
                taken.append(elapsed_s)
    return seconds
