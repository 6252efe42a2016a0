"""Moving bytes in pieces: the size of a piece changes nothing, and an error stops the rest."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from preload.engine.errors import CheckpointError
from preload.engine.loading import fill
from preload.engine.loading.files import fault
from preload.engine.loading.fill import Filled, Filler
from preload.engine.loading.plan import make_plan
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.recipe import QUANTIZATIONS, Recipe


class Memory:
    """One segment, and every write to it."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.writes: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def write(self, segment: int, offset: int, data: memoryview) -> None:
        assert segment == 0
        with self._lock:
            self.bytes[offset : offset + len(data)] = data
            self.writes.append((offset, offset + len(data)))


def run(path: str, quantization: str, num_threads: int) -> tuple[Filled, Memory, list[int]]:
    checkpoint, resolved = open_and_resolve(path, Recipe(quantization=quantization))
    plan = make_plan(target for step in resolved.steps for target in step.targets)
    memory = Memory(plan.segment_bytes[0])
    progress: list[int] = []
    filled = Filler(resolved, plan, memory.write).run(num_threads, progress.append)
    checkpoint.close()
    assert progress[-1] == resolved.num_source_bytes
    return filled, memory, progress


@pytest.mark.parametrize("quantization", [name for name in QUANTIZATIONS if name != "f32"])
def test_the_size_of_a_piece_changes_no_byte(
    quantization: str,
    monkeypatch: pytest.MonkeyPatch,
    tiny_config: Any,
    tiny_weights: Any,
    write_llama: Any,
) -> None:
    config = {**tiny_config, "vocab_size": 3000}  # many blocks of 128 rows
    folder = str(write_llama(config, tiny_weights(config)))
    whole, whole_memory, _ = run(folder, quantization, 1)
    monkeypatch.setattr(fill, "PIECE_BYTES", 1000)
    monkeypatch.setattr(fill, "CONVERTED_VALUES", 300)
    pieces, memory, _ = run(folder, quantization, 3)
    assert pieces == whole
    assert memory.bytes == whole_memory.bytes
    assert len(memory.writes) > 2 * len(whole_memory.writes)


def test_no_byte_is_written_twice(tiny_config: Any, tiny_weights: Any, write_llama: Any) -> None:
    _, memory, _ = run(str(write_llama(tiny_config, tiny_weights(tiny_config))), "int4_group32", 2)
    position = 0
    for start, end in sorted(memory.writes):
        assert start >= position
        position = end


def test_the_first_error_is_raised_and_stops_the_rest(tiny_config: Any, tiny_weights: Any, write_llama: Any) -> None:
    checkpoint, resolved = open_and_resolve(str(write_llama(tiny_config, tiny_weights(tiny_config))), Recipe())
    plan = make_plan(target for step in resolved.steps for target in step.targets)
    calls: list[int] = []

    def write(segment: int, offset: int, data: memoryview) -> None:
        calls.append(offset)
        raise fault("a.safetensors", "is broken", "t")

    with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor 't' is broken"):
        Filler(resolved, plan, write).run(1, lambda done_bytes: None)
    assert len(calls) < len(resolved.steps)
    checkpoint.close()
