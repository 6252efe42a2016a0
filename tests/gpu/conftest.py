"""Tests of this folder run on a real GPU; elsewhere they are skipped, and say why."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from preload.engine.cuda.devices import visible_devices
from preload.engine.errors import PreloadError


@cache
def why_not() -> str:
    """What is missing for these tests; empty if nothing is."""
    try:
        devices = visible_devices()
    except PreloadError as error:
        return error.message
    if all(device.is_emulated for device in devices):
        return "the only GPUs are emulated ones"
    import torch

    if not torch.cuda.is_available():
        return f"this torch ({torch.__version__}) has no CUDA"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def gpu() -> str:
    """The name by which the first GPU is asked for. Skips without one."""
    reason = why_not()
    if reason:
        pytest.skip(f"no GPU: {reason}")
    return "cuda:0"
