"""Weights converted on a device that does everything late: the bytes, digests and errors of the host's conversion.

The device is one of the host's own, strict about where tensors are (tests/fakes/strict_device.py). Its queue does not
begin with anything before it is waited for, so a buffer that is filled too early, or read too early, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from preload.engine.errors import CheckpointError, DeviceError, NoMemoryError
from preload.engine.loading import cuda_conversion, fill
from preload.engine.loading.device_conversion import DeviceConversion
from preload.engine.loading.fill import Filled, Filler
from preload.engine.loading.plan import make_plan
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.recipe import QUANTIZATIONS, Recipe

SEGMENT_AT = 1 << 20


class LateQueue:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._waiting: list[Callable[[], tuple[list[int], bool]]] = []
        self._done: list[tuple[list[int], bool]] = []

    def submit(self, stored: torch.Tensor, work: Any, put: Any, out: torch.Tensor) -> LateTicket:
        self._device.num_submitted += 1
        if self._device.num_submitted == self._device.fails_at:
            raise NoMemoryError("the device has no memory left")
        self._waiting.append(lambda: self._do(stored, work, put, out))
        self._device.most_waiting = max(self._device.most_waiting, len(self._waiting) - len(self._done))
        return LateTicket(self, len(self._waiting))

    def _do(self, stored: torch.Tensor, work: Any, put: Any, out: torch.Tensor) -> tuple[list[int], bool]:
        with self._device.strict() as device:
            parts, is_good = work(stored.to(device, non_blocking=True))
            assert all(part.device == device and part.dtype == torch.uint8 for part in (*parts, is_good.byte()))
            here = [part.cpu() for part in parts]
            end = 0
            for index, part in enumerate(here):
                if put is not None and len(part):
                    at = put(index, len(part)) - SEGMENT_AT
                    self._device.memory[at : at + len(part)] = part.numpy().tobytes()
                out[end : end + len(part)].copy_(part)
                end += len(part)
            assert end < len(out), "there is room for the word on the results"
            return [len(part) for part in here], bool(is_good)

    def wait_for(self, count: int) -> tuple[list[int], bool]:
        while len(self._done) < count:
            self._done.append(self._waiting[len(self._done)]())
        return self._done[count - 1]


class LateTicket:
    def __init__(self, queue: LateQueue, number: int) -> None:
        self._queue, self._number = queue, number

    def wait(self) -> tuple[list[int], bool]:
        return self._queue.wait_for(self._number)


class LateDevice:
    """`memory`: its one segment."""

    name = "late"

    def __init__(self, size: int, strict: Any, fails_at: int = 0) -> None:
        self.memory = bytearray(size)
        self.strict = strict
        self.fails_at = fails_at
        self.num_submitted = self.most_waiting = self.num_pinned_bytes = 0

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.num_pinned_bytes += num_bytes
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def queue(self) -> LateQueue:
        return LateQueue(self)

    def release(self) -> str:
        return "nothing"


def run(path: str, quantization: str, late: Callable[[int], LateDevice] | None) -> tuple[Filled, bytes, Any]:
    """One load, by the host or by a device."""
    checkpoint, resolved = open_and_resolve(path, Recipe(quantization=quantization))
    plan = make_plan(target for step in resolved.steps for target in step.targets)
    device = late(plan.segment_bytes[0]) if late else None
    memory = device.memory if device else bytearray(plan.segment_bytes[0])

    def write(segment: int, offset: int, data: memoryview) -> None:
        memory[offset : offset + len(data)] = data

    conversion = None if device is None else DeviceConversion(device, lambda _, offset: SEGMENT_AT + offset)
    progress: list[int] = []
    filled = Filler(resolved, plan, write, conversion).run(2, progress.append)
    checkpoint.close()
    assert progress[-1] == resolved.num_source_bytes
    return filled, bytes(memory), device


@pytest.fixture
def folder(tiny_config: Any, tiny_weights: Any, write_llama: Any) -> str:
    config = {**tiny_config, "vocab_size": 1000}  # several blocks of 128 rows, and one that is cut off
    return str(write_llama(config, tiny_weights(config)))


@pytest.fixture
def strict(load_strict: Any) -> Any:
    return load_strict.strict_device


@pytest.mark.parametrize("values", [fill.CONVERTED_VALUES, 300])
@pytest.mark.parametrize("quantization", [name for name in QUANTIZATIONS if name not in ("keep", "f32")])
def test_a_device_makes_what_the_host_makes(
    folder: str, strict: Any, monkeypatch: pytest.MonkeyPatch, quantization: str, values: int
) -> None:
    expected, expected_memory, _ = run(folder, quantization, None)
    monkeypatch.setattr(fill, "CONVERTED_VALUES", values)
    filled, memory, device = run(folder, quantization, lambda size: LateDevice(size, strict))
    assert filled == expected
    assert memory == expected_memory
    assert device.num_submitted > 0
    if values == 300:
        assert device.most_waiting == 2, "a piece is read while the one before is on the device"
        assert device.num_pinned_bytes < 200_000, "memory is bounded by the pieces"


def test_quantized_blocks_are_converted_in_the_order_of_their_rows(
    write_gguf: Any,
    tiny_config: Any,
    tiny_weights: Any,
    strict: Any,
    demo_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the demo model: GGUF blocks of several types, and rows of q and k that are stored permuted."""
    monkeypatch.setattr(fill, "CONVERTED_VALUES", 1 << 18)
    expected, expected_memory, _ = run(str(demo_model), "int8_per_channel", None)
    filled, memory, _ = run(str(demo_model), "int8_per_channel", lambda size: LateDevice(size, strict))
    assert filled == expected
    assert memory == expected_memory


@pytest.mark.parametrize("quantization", ["bf16", "int4_group32", "fp8_per_tensor", "nvfp4"])
def test_experts_are_stacked_on_a_device_as_on_the_host(
    strict: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    monkeypatch.setattr(fill, "CONVERTED_VALUES", 500)
    expected, expected_memory, _ = run(str(tmp_path / "mixtral"), quantization, None)
    filled, memory, _ = run(str(tmp_path / "mixtral"), quantization, lambda size: LateDevice(size, strict))
    assert filled == expected
    assert memory == expected_memory


@pytest.mark.parametrize("quantization", ["mxfp8", "nvfp4"])
def test_values_that_are_not_finite_are_told_by_their_tensor(
    tiny_config: Any, tiny_weights: Any, write_llama: Any, strict: Any, quantization: str
) -> None:
    weights = tiny_weights(tiny_config)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name].flat[77] = float("nan") if weights[name].dtype.kind == "f" else 0x7FC0
    with pytest.raises(CheckpointError, match=rf"{name}.*not finite"):
        run(str(write_llama(tiny_config, weights)), quantization, lambda size: LateDevice(size, strict))


def test_a_device_without_memory_ends_the_load(folder: str, strict: Any) -> None:
    with pytest.raises(NoMemoryError, match="no memory left"):
        run(folder, "mxfp8", lambda size: LateDevice(size, strict, fails_at=3))


@pytest.mark.parametrize(("device", "reason"), [("host", "the host's memory"), ("", "the host's memory")])
def test_who_converts_is_said_with_the_reason(device: str, reason: str) -> None:
    found, text = cuda_conversion.choose_device(device)
    assert found is None
    assert text == f"converted by the CPU because the weights go to {reason}"


def test_a_torch_without_cuda_is_the_reason_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from preload.engine.cuda.devices import VisibleDevice

    gpu = VisibleDevice("cuda:GPU-1", 3, "NVIDIA something", 0)
    monkeypatch.setattr(cuda_conversion, "find_device", lambda name: gpu)
    found, text = cuda_conversion.choose_device("cuda:GPU-1")
    assert (found, text) == (None, f"converted by the CPU because this torch ({torch.__version__}) has no CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (
        cuda_conversion.choose_device("cuda:GPU-1")[1] == "converted by the CPU because torch does not see cuda:GPU-1"
    )


def test_errors_of_torch_are_told_as_ours() -> None:
    device = torch.device("cuda", 1)
    told = cuda_conversion._told(torch.OutOfMemoryError("CUDA out of memory. Tried to\nmore"), device)
    assert isinstance(told, NoMemoryError)
    assert "cuda:1 has no memory left to convert weights in (CUDA out of memory. Tried to)" in told.message
    lost = cuda_conversion._told(RuntimeError("CUDA error: device lost"), device)
    assert isinstance(lost, DeviceError)
    assert "conversion on cuda:1 failed: CUDA error: device lost" in lost.message
