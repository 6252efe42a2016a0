"""Weights converted on a device that does everything late: the bytes, digests and errors of the host's conversion.

The device is one of the host's own, strict about where tensors are (tests/fakes/strict_device.py). Its queue does not
begin with anything before it is waited for, so a buffer that is filled too early, or read too early, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preload.engine.errors import CheckpointError, DeviceError, NoMemoryError, PreloadError
from preload.engine.loading import cuda_conversion, fill
from preload.engine.loading.device_conversion import DeviceConversion, _Lane
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


class NotingDevice:
    """Notes which submissions have been waited for; `lost`: those whose wait fails. The third is not taken if
    `is_full`."""

    def __init__(self, lost: Sequence[int] = (), *, is_full: bool = False) -> None:
        self.lost, self.is_full = lost, is_full
        self.num_submitted = 0
        self.waited: list[int] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def queue(self) -> Any:
        return self

    def release(self) -> str:
        return "nothing"

    def submit(self, stored: torch.Tensor, work: Any, put: Any, out: torch.Tensor) -> Any:
        number, self.num_submitted = self.num_submitted, self.num_submitted + 1
        if number == 2 and self.is_full:
            raise NoMemoryError("the device has no memory left")

        def wait() -> tuple[list[int], bool]:
            self.waited.append(number)
            if number in self.lost:
                raise DeviceError(f"piece {number} is lost")
            return [8], True

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(
    ("device", "unreadable", "words", "waited"),
    [
        (NotingDevice(is_full=True), None, "no memory left", [0, 1]),
        (NotingDevice([0]), None, "piece 0 is lost", [0, 1]),
        (NotingDevice([0, 1]), None, "piece 0 is lost", [0, 1]),
        (NotingDevice([1]), 2, "piece 2 is unreadable", [0, 1]),
        (NotingDevice(), 1, "piece 1 is unreadable", [0]),
    ],
)
def test_nothing_is_under_way_when_a_run_has_failed_and_the_first_error_is_told(
    device: NotingDevice, unreadable: int | None, words: str, waited: list[int]
) -> None:
    """Segments are unmapped then."""
    pieces: Any = [SimpleNamespace(num_bytes=8, out_bytes=8) for _ in range(4)]

    def read(piece: Any, into: memoryview) -> bool:
        if device.num_submitted == unreadable:
            raise CheckpointError(f"piece {unreadable} is unreadable")
        return True

    lane = _Lane(device)
    with pytest.raises((NoMemoryError, DeviceError, CheckpointError), match=words):
        lane.run(pieces, read, lambda piece: lambda stored: ([], stored), None, lambda parts, is_good: None)
    assert device.waited == waited


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
    assert "conversion on cuda:1 failed: CUDA error: device lost; load again" in lost.message


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            RuntimeError("CUDA error: device lost\nmore"),
            DeviceError,
            "cuda:1 failed: CUDA error: device lost; load again",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            NoMemoryError,
            "cuda:1 has no memory left to convert weights in",
        ),
    ],
)
def test_no_call_of_torch_fails_untold(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, kind: type[PreloadError], words: str
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fail)
    with pytest.raises(kind, match=words):
        cuda_conversion.CudaConversion(1)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    device = cuda_conversion.CudaConversion(1)
    monkeypatch.setattr(torch.cuda, "Stream", fail)
    monkeypatch.setattr(cuda_conversion, "shared_driver", lambda: None)
    with pytest.raises(kind, match=words):
        device.queue()
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(kind, match=words):
        device.release()
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(NoMemoryError, match=r"4096 bytes of the host's memory could not be pinned .* cuda:1 \(CUDA"):
        device.pinned(4096)


def test_a_submission_that_fails_is_over_before_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part may be on its way into a segment."""
    seen: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: seen.append("waited"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    queue = cuda_conversion.CudaQueue(torch.device("cuda", 1), SimpleNamespace())  # type: ignore[arg-type]

    errors = [NoMemoryError("full"), RuntimeError("lost")]

    def fail(*args: Any) -> Any:
        seen.append("begun")
        raise errors.pop()

    monkeypatch.setattr(queue, "_submit", fail)
    for kind in (DeviceError, NoMemoryError):
        with pytest.raises(kind):
            queue.submit(torch.empty(0), lambda stored: ([], stored), None, torch.empty(0))
    assert seen == ["begun", "waited"] * 2
