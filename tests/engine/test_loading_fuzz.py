"""Checkpoints with flipped bytes, cut ends and absurd values: only a CheckpointError may come out, within bounded
memory. A failure prints its seed and leaves the files of its case in the test's folder."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.engine.errors import CheckpointError
from preload.engine.loading import files
from preload.engine.loading.control import MAX_PACKET_BYTES, bounded
from preload.engine.loading.digests import outline
from preload.engine.loading.plan import make_plan
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.loading.settled import FileStat
from preload.engine.recipe import QUANTIZATIONS, Recipe

MEMORY_BYTES = 1 << 30
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    31,
    255,
    1 << 20,
    (1 << 31) - 1,
    1 << 32,
    (1 << 48) + 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
JSON_VALUES = (
    *(str(number) for number in NUMBERS), "-1", "1.5", "1e999", "1" + "0" * 400, "1" * 5000, "NaN", "-Infinity",
    "true", "null", '""', '"\\ud800"', '"llama3"', '"yarn"', "[]", "{}", "[[[]]]", "[" * 100 + "]" * 100,
    "[18446744073709551615]", '{"rope_type":"yarn","factor":2}',
    '{"rope_type":"dynamic","factor":1e300}', '"LlamaForCausalLM"', "[null]",
)  # fmt: skip


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz-seed") or int.from_bytes(os.urandom(4))


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--fuzz-seconds"))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more gigabyte of address space than is in use. Files need not be settled: nothing else writes to them."""
    monkeypatch.setattr(files, "settle", lambda fd: FileStat.of(os.fstat(fd)))
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def broken_bytes(rng: random.Random, data: bytes, header_bytes: int) -> bytes:
    """One to four mutations, most of them in the header."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(min(header_bytes, len(content)) or 1)
        match rng.randrange(6):
            case 0:
                content[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                content[place : place + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 2:
                content[place : place + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            case 3:
                del content[rng.randrange(len(content) or 1) :]
            case 4:
                content[place:place] = content[: rng.randrange(64)]
            case 5:
                del content[place : place + rng.randrange(1, 16)]
    return bytes(content)


def broken_json(rng: random.Random, value: dict[str, Any]) -> bytes:
    """The object with some value, anywhere in it, replaced by an absurd one, or a name by an absurd name."""
    text = json.dumps(value)
    for _ in range(rng.randint(1, 3)):
        parts = text.split('": ')
        if rng.random() < 0.2:
            text = text.replace('"', '"\\ud8' + rng.choice(("00", "7f")), 1) if rng.random() < 0.3 else text + text
            continue
        index = rng.randrange(1, len(parts)) if len(parts) > 1 else 0
        rest = parts[index]
        end = next((i for i, char in enumerate(rest) if char in ",}"), len(rest))
        parts[index] = rng.choice(JSON_VALUES) + rest[end:]
        text = '": '.join(parts)
    return text.encode()


def attack(path: Path, rng: random.Random) -> str:
    """What a loader does with the headers. Returns how it went."""
    recipe = Recipe(model=rng.choice(("auto", "auto", "raw")))
    if recipe.model == "auto":
        recipe = Recipe(quantization=rng.choice(QUANTIZATIONS))
    opened, refusal = None, None
    try:
        opened, resolved = open_and_resolve(str(path), recipe)
        assert len(outline(opened.tensors, resolved.to_json())) == 32
        make_plan(target for step in resolved.steps for target in step.targets)
    except CheckpointError as error:
        refusal = error
    finally:
        if opened is not None:
            opened.close()
    if refusal is None:
        return "opened"
    assert refusal.fields["file"]
    assert len(bounded(refusal).SerializeToString()) < MAX_PACKET_BYTES
    return "refused"


def run(path: Path, write: Callable[[random.Random], None], seed: int, seconds: float) -> None:
    print(f"--fuzz-seed {seed}")
    end_s, number, outcomes = time.monotonic() + seconds, 0, {"refused": 0, "opened": 0}
    while time.monotonic() < end_s or number < 50:
        rng = random.Random(f"{seed} {number}")
        write(rng)
        try:
            outcomes[attack(path, rng)] += 1
        except BaseException as error:
            error.add_note(f"case {number} of --fuzz-seed {seed}, in {path}")
            raise
        number += 1
    print(f"{number} cases: {outcomes}")
    assert outcomes["refused"] > number // 10, "the mutations broke nothing"


@pytest.mark.usefixtures("little_memory")
def test_broken_safetensors_are_refused(
    write_llama: Any, tiny_config: Any, tiny_weights: Any, seed: int, seconds: float
) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:header_bytes])

    def write(rng: random.Random) -> None:
        if rng.random() < 0.5:
            path.write_bytes(broken_bytes(rng, whole, header_bytes))
        else:
            text = broken_json(rng, header)
            path.write_bytes(len(text).to_bytes(8, "little") + text + whole[header_bytes:])

    run(folder, write, seed, seconds)


@pytest.mark.usefixtures("little_memory")
def test_broken_gguf_files_are_refused(
    tmp_path: Path, gguf_bytes: Callable[..., bytes], seed: int, seconds: float
) -> None:
    text = struct.pack("<Q", 5) + b"llama"
    pairs = {
        "general.architecture": (8, text),
        "llama.block_count": (4, struct.pack("<I", 1)),
        "llama.attention.head_count": (4, struct.pack("<I", 2)),
        "llama.embedding_length": (4, struct.pack("<I", 32)),
        "llama.feed_forward_length": (4, struct.pack("<I", 32)),
        "llama.context_length": (4, struct.pack("<I", 64)),
        "llama.rope.scaling.type": (8, struct.pack("<Q", 4) + b"yarn"),
        "llama.rope.scaling.factor": (6, struct.pack("<f", 2.0)),
        "llama.rope.scaling.attn_factor": (6, struct.pack("<f", 0.5)),
        "texts": (9, struct.pack("<IQ", 8, 2) + text + text),
        "nested": (9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 5, 2) + bytes(8)),
    }
    names = ["token_embd", "output", "blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output"]
    names += ["blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"]
    tensors = [(f"{name}.weight", (32, 32), 2, bytes(32 * 18), None) for name in names]
    norms = ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]
    tensors += [(f"{name}.weight", (32,), 0, bytes(128), None) for name in norms]  # type: ignore[misc]
    whole = gguf_bytes(tensors, pairs)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    assert attack(path, random.Random(0)) == "opened"
    header_bytes = len(whole) - 9 * 576 - 3 * 128
    run(path, lambda rng: void(path.write_bytes(broken_bytes(rng, whole, header_bytes))), seed, seconds)


def void(_: object) -> None:
    """Takes a result that nobody wants."""


@pytest.mark.usefixtures("little_memory")
def test_broken_configurations_and_indices_are_refused(
    write_llama: Any, tiny_config: Any, tiny_weights: Any, seed: int, seconds: float
) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {**tiny_config, "rope_scaling": {**scaling, "original_max_position_embeddings": 64}, "head_dim": 16}
    folder = write_llama(config, tiny_weights(config), num_shards=2)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_bytes())

    def write(rng: random.Random) -> None:
        for path, value in ((folder / "config.json", config), (index_path, index)):
            broken = rng.random() < 0.7 if path.name == "config.json" else rng.random() < 0.3
            whole = json.dumps(value).encode()
            content = whole
            if broken:
                content = broken_json(rng, value) if rng.random() < 0.7 else broken_bytes(rng, whole, len(whole))
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            path.write_bytes(content)

    run(folder, write, seed, seconds)
