"""Recipes that convert, on device memory: the same bytes are resident as on the host."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_block", "mxfp8", "mxfp4", "nvfp4"])
def test_converted_weights_are_those_of_the_host(
    daemon: Any, device: str, tmp_path: Path, load_module: Any, load_on: Any, hold: Any, quantization: str
) -> None:
    from preload.engine.client import attach

    tiny = load_module("fakes/core_side.py").make_tiny_model(hidden_size=64, intermediate_size=96)
    tiny.oracle.save_pretrained(tmp_path / "tiny")
    recipe = {"model": "auto", "quantization": quantization}
    on_host, on_device = (load_on(daemon, tmp_path / "tiny", where, **recipe) for where in ("host", device))
    assert on_host.id == on_device.id
    with attach(
        generation_id=on_host.id, device="host", runtime_dir=str(daemon.runtime_dir), tensors="buffers"
    ) as found:
        digests = {name: hashlib.sha256(view).hexdigest() for name, view in found.tensors.items()}
        assert set(found.layouts.values()) == {quantization, "dense"}
    holder = hold(daemon, generation_id=on_device.id, device=device, tensors="buffers")
    assert {name: holder.ask(f"digest {name}") for name in digests} == digests
