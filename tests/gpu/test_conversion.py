"""Conversion on a real GPU: the bits that a CPU makes, without tolerance, and all transient memory given back.

Nothing is allowed for, since every operation of a conversion is rounded once on either: conversions of type, products
and differences, divisions by tensors (`minifloat.divided` says why not by numbers), maxima, and integers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from preload.engine.cuda.devices import resolve_device
from preload.engine.loading.convert import _QUANTIZERS
from preload.engine.loading.cuda_conversion import CudaConversion, choose_device
from preload.engine.loading.device_conversion import DeviceConversion
from preload.engine.loading.fill import Filled, Filler
from preload.engine.loading.plan import make_plan
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.quantization import dequantize, fp8_per_tensor, nvfp4
from preload.engine.quantization.layouts import GGUF_DEQUANTIZERS
from preload.engine.recipe import Recipe

QUANTIZERS: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    **_QUANTIZERS, fp8_per_tensor.LAYOUT: fp8_per_tensor.quantize, nvfp4.LAYOUT: nvfp4.quantize,
}  # fmt: skip


def weights() -> torch.Tensor:
    """Of every size that a float32 may have, ties of roundings among them, and groups of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 512, generator=generator) * torch.logspace(-30, 8, 300)[:, None]
    x[5] = 0
    x[6] = torch.arange(512) / 64
    x[7] = torch.arange(512).float() * 2.0**-140
    return x


@pytest.mark.parametrize("layout", QUANTIZERS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_parts_are_bit_for_bit_those_of_the_cpu(gpu: str, layout: str, stored: torch.dtype) -> None:
    x = weights().to(stored)
    x = x.masked_fill(~x.isfinite(), 0)
    expected = QUANTIZERS[layout](x.float())
    got = QUANTIZERS[layout](x.to(gpu).float())
    for name, part in expected.items():
        assert torch.equal(got[name].cpu().view(torch.uint8), part.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("kind", GGUF_DEQUANTIZERS)
def test_blocks_mean_the_same_numbers(gpu: str, kind: str) -> None:
    blocks = torch.randint(0, 256, (64, 40 * 210 * 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    from preload.engine.loading.gguf_types import BLOCK_TYPES

    rows = blocks[:, : blocks.shape[1] // BLOCK_TYPES[kind].block_bytes * BLOCK_TYPES[kind].block_bytes]
    expected, got = (dequantize(f"gguf.{kind}", {"weight": part}) for part in (rows, rows.to(gpu)))
    assert torch.equal(got.cpu().nan_to_num(1.5), expected.nan_to_num(1.5))


@pytest.mark.parametrize("quantization", ["bf16", "fp8_per_tensor", "fp8_per_block", "nvfp4", "int4_group32"])
def test_a_load_by_the_gpu_is_one_by_the_cpu(gpu: str, demo_model: Path, quantization: str) -> None:
    """The real model by lanes, pinned buffers, streams and events, into memory of torch's instead of segments."""

    def load(device: str) -> tuple[Filled, torch.Tensor]:
        checkpoint, resolved = open_and_resolve(str(demo_model), Recipe(quantization=quantization))
        plan = make_plan(target for step in resolved.steps for target in step.targets)
        memory = torch.zeros(plan.segment_bytes[0], dtype=torch.uint8, device=device)

        def write(segment: int, offset: int, data: memoryview) -> None:
            memory[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)

        found = None
        if device != "cpu":
            found = DeviceConversion(CudaConversion(torch.device(device).index), lambda _, at: memory.data_ptr() + at)
        filled = Filler(resolved, plan, write, found).run(4, lambda _: None)
        checkpoint.close()
        if found is not None:
            assert found.device.release()
        return filled, memory.cpu()

    expected, got = load("cpu"), load(gpu)
    assert got[0] == expected[0], "digests of what was read, and of what is resident"
    assert torch.equal(got[1], expected[1])


def test_transient_memory_is_given_back_when_a_load_ends(gpu: str, daemon: Any, demo_model: Path) -> None:
    from preload.engine.client.control import make_selector

    def free() -> int:
        return int(torch.cuda.mem_get_info(gpu)[0])

    with daemon.control() as control:
        for _ in range(2):  # the first load leaves what a driver keeps for good
            before = free()
            *_, last = control.load(
                demo_model, Recipe(quantization="mxfp8"), device=resolve_device(gpu), timeout_s=120
            )
            taken = before - free()
            control.evict(make_selector(generation_id=last.loaded.id))
    assert taken < last.loaded.resident_bytes + (16 << 20), "segments and no more"


def test_the_gpu_is_chosen_and_said(gpu: str) -> None:
    found, text = choose_device(resolve_device(gpu))
    assert found is not None
    assert text.startswith("converted on cuda:0 (")
