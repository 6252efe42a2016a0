"""The loader as a process, with the daemon's side of its protocol played by the test."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from blake3 import blake3

from preload.engine.loading.gguf_types import GGUF_TYPES
from preload.engine.quantization import COMPANIONS, dequantize
from preload.engine.recipe import QUANTIZATIONS, Recipe
from preload.protos import loader_pb2, weight_cache_pb2

ERROR_BOUND = {
    "keep": 0.0, "f32": 0.0, "bf16": 0.003, "int8_per_channel": 0.02, "int4_group32": 0.12, "fp8_per_tensor": 0.03,
    "fp8_per_block": 0.03, "mxfp8": 0.03, "mxfp4": 0.15, "nvfp4": 0.12,
}  # fmt: skip
"""Relative error (norms over a whole weight) that a recipe may add."""
EMBEDDING = "model.embed_tokens.weight"


def weight(outcome: Any, name: str) -> torch.Tensor:
    """A resident weight as float32, through its layout."""
    entry = outcome.entry(name)

    def part(suffix: str) -> torch.Tensor:
        array = torch.from_numpy(outcome.array(name + suffix).copy())
        dtype = outcome.entry(name + suffix).dtype
        return array.view(getattr(torch, dtype)) if dtype in ("bfloat16", "float8_e4m3fn") else array

    parts = {"weight": part("")} | {key: part(f"_{key}") for key in COMPANIONS.get(entry.layout, ())}
    return dequantize(entry.layout, parts)


def relative_error(got: torch.Tensor, expected: np.ndarray[Any, Any]) -> float:
    reference = torch.from_numpy(expected.copy())
    return float((got - reference).norm() / reference.norm())


def assert_consistent(outcome: Any) -> None:
    """Digests, places and sizes of a manifest are those of the memory."""
    assert outcome.returncode == 0, (outcome.failed, outcome.stderr)
    assert outcome.manifest.segment_bytes == outcome.plan.segment_bytes
    for tensor in outcome.manifest.tensors:
        assert blake3(outcome.raw(tensor.name)).digest() == tensor.digest, tensor.name
        assert tensor.offset % 64 == 0


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_safetensors_weights_are_resident_as_the_recipe_says(
    quantization: str, loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    weights = tiny_weights(tiny_config)
    outcome = loader.load(write_llama(tiny_config, weights), Recipe(quantization=quantization))
    assert_consistent(outcome)
    companions = {f"{t.name}" for t in outcome.manifest.tensors if t.name.endswith(("_scale", "_min"))}
    assert {tensor.name for tensor in outcome.manifest.tensors} - companions == set(weights)
    for name, expected in weights.items():
        bound = ERROR_BOUND[quantization] if expected.ndim == 2 else 0.0
        assert relative_error(weight(outcome, name), expected) <= bound, name
    assert json.loads(outcome.manifest.resolved_recipe)["quantization"] == quantization


@pytest.fixture(scope="module")
def demo_reference(demo_model: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A sample of the demo model's weights in float32 and in Hugging Face's row order."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(demo_model)).tensors}

    def read(name: str) -> np.ndarray[Any, Any]:
        return gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    def unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
        return rows.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    return {
        EMBEDDING: read("token_embd.weight"),
        "model.norm.weight": read("output_norm.weight"),
        "model.layers.0.self_attn.q_proj.weight": unpermute(read("blk.0.attn_q.weight"), 9),
        "model.layers.29.self_attn.k_proj.weight": unpermute(read("blk.29.attn_k.weight"), 3),
        "model.layers.7.self_attn.v_proj.weight": read("blk.7.attn_v.weight"),
        "model.layers.7.mlp.down_proj.weight": read("blk.7.ffn_down.weight"),
    }


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_demo_model_is_resident_as_the_recipe_says(
    quantization: str, loader: Any, demo_model: Path, demo_reference: dict[str, np.ndarray[Any, Any]]
) -> None:
    outcome = loader.load(demo_model, Recipe(quantization=quantization))
    assert_consistent(outcome)
    for name, expected in demo_reference.items():
        error = relative_error(weight(outcome, name), expected)
        print(f"{quantization:18} {name:45} relative error {error:.5f}")
        assert error <= (ERROR_BOUND[quantization] if expected.ndim == 2 else 0.0), name
    head, embedding = outcome.entry("lm_head.weight"), outcome.entry(EMBEDDING)
    assert head.alias_of == EMBEDDING
    assert (head.segment, head.offset, head.layout) == (embedding.segment, embedding.offset, embedding.layout)
    verified = loader.verify(outcome)
    assert verified.verified.num_tensors == sum(not tensor.alias_of for tensor in outcome.manifest.tensors)
    assert list(verified.verified.corrupted) == []


def test_verify_names_the_one_tensor_with_a_flipped_byte(
    loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    outcome = loader.load(write_llama(tiny_config, tiny_weights(tiny_config)))
    name = "model.layers.1.mlp.up_proj.weight"
    entry = outcome.entry(name)
    position = entry.offset + entry.num_bytes - 1
    before = os.pread(outcome.segments[entry.segment], 1, position)
    os.pwrite(outcome.segments[entry.segment], bytes([before[0] ^ 1]), position)
    verified = loader.verify(outcome)
    assert verified.returncode == 0
    assert list(verified.verified.corrupted) == [name]
    assert verified.progress[-1].done_bytes == verified.progress[-1].total_bytes == verified.verified.num_bytes


def test_verify_refuses_segments_of_another_generation(
    loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    outcome = loader.load(write_llama(tiny_config, tiny_weights(tiny_config)))
    other = os.memfd_create("other")
    os.ftruncate(other, 4096)
    outcome.segments = [other]
    refused = loader.verify(outcome)
    os.close(other)
    assert refused.returncode == 1
    assert refused.failed.reason == weight_cache_pb2.BAD_REQUEST


def test_digests_do_not_depend_on_sharding_or_path(
    loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    weights = tiny_weights(tiny_config)
    single = loader.load(write_llama(tiny_config, weights, name="a"))
    sharded = loader.load(write_llama(tiny_config, weights, num_shards=3, name="b/c"))
    digest = single.manifest.checkpoint_digest
    assert len(digest) == 64
    assert sharded.manifest.checkpoint_digest == digest
    assert sharded.manifest.resolved_recipe == single.manifest.resolved_recipe
    assert len(sharded.receipts) == 6  # three shards, index, configuration, the folder
    weights["model.norm.weight"][0] += 1
    changed = loader.load(write_llama(tiny_config, weights, name="d"))
    assert changed.manifest.checkpoint_digest != digest


def test_digest_mode_says_what_a_load_says_without_memory(
    loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    loaded = loader.load(folder, Recipe(quantization="bf16"))
    digested = loader.load(folder, Recipe(quantization="bf16"), mode=loader_pb2.MODE_DIGEST)
    assert digested.plan is None
    assert digested.digested.checkpoint_digest == loaded.manifest.checkpoint_digest
    assert digested.digested.resolved_recipe == loaded.manifest.resolved_recipe
    assert digested.receipts == loaded.receipts
    assert digested.progress[-1].phase == "digest"


def test_receipts_prove_what_was_read(loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    receipts = {os.path.relpath(receipt.path, folder): receipt for receipt in loader.load(folder).receipts}
    assert set(receipts) == {".", "config.json", "model.safetensors"}
    for name, receipt in receipts.items():
        stat = (folder / name).stat()
        assert receipt.path == str(folder / name)
        assert not receipt.stat_blind
        assert (receipt.device, receipt.inode, receipt.size_bytes) == (stat.st_dev, stat.st_ino, stat.st_size)
        assert (receipt.mtime_ns, receipt.ctime_ns) == (stat.st_mtime_ns, stat.st_ctime_ns)
    assert receipts["config.json"].content_digest == blake3((folder / "config.json").read_bytes()).digest()
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = {os.path.relpath(receipt.path, folder): receipt for receipt in loader.load(folder).receipts}
    assert again["."] == receipts["."]
    assert again["config.json"].content_digest == receipts["config.json"].content_digest
    assert again["model.safetensors"].content_digest != receipts["model.safetensors"].content_digest


def test_links_of_a_cache_are_followed_and_receipts_keep_the_path_given(
    loader: Any, tmp_path: Path, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config), name="blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder / f"hash-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
    receipts = loader.load(snapshot).receipts
    assert [receipt.path for receipt in receipts] == [
        str(snapshot),
        str(snapshot / "config.json"),
        str(snapshot / "model.safetensors"),
    ]
    assert receipts[2].inode == (folder / "hash-model.safetensors").stat().st_ino


def test_raw_keeps_every_tensor_under_its_own_name(
    loader: Any, tmp_path: Path, write_safetensors: Callable[..., Path]
) -> None:
    tensors = {
        "matrix": ("BF16", [3, 2], os.urandom(12)),
        "scalar": ("F64", [], os.urandom(8)),
        "empty": ("F32", [0, 4], b""),
        "ids": ("I64", [3], os.urandom(24)),
    }
    outcome = loader.load(write_safetensors(tmp_path / "x.safetensors", tensors), Recipe(model="raw"))
    assert_consistent(outcome)
    for name, (_, shape, data) in tensors.items():
        assert list(outcome.entry(name).shape) == shape
        assert outcome.raw(name) == data
    assert json.loads(outcome.manifest.resolved_recipe)["spec"] is None
    assert [os.path.basename(receipt.path) for receipt in outcome.receipts] == ["x.safetensors"]


def test_raw_keeps_gguf_blocks_and_names(loader: Any, demo_model: Path) -> None:
    outcome = loader.load(demo_model, Recipe(model="raw"))
    assert_consistent(outcome)
    for tensor in gguf.GGUFReader(str(demo_model)).tensors:
        assert outcome.raw(tensor.name) == tensor.data.tobytes()
    assert outcome.entry("blk.0.attn_q.weight").layout == "gguf.q4_1"


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("quantization", ["keep", "int8_per_channel"])
def test_tied_weights_share_memory_whether_stored_or_not(
    stored: bool, quantization: str, loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    config = {**tiny_config, "tie_word_embeddings": True}
    weights = tiny_weights(config)
    if stored:
        weights["lm_head.weight"] = weights[EMBEDDING].copy()
    outcome = loader.load(write_llama(config, weights), Recipe(quantization=quantization))
    assert_consistent(outcome)
    aliases = {tensor.name: tensor.alias_of for tensor in outcome.manifest.tensors if tensor.alias_of}
    suffixes = ["", "_scale"] if quantization == "int8_per_channel" else [""]
    assert aliases == {f"lm_head.weight{suffix}": f"{EMBEDDING}{suffix}" for suffix in suffixes}


@pytest.mark.parametrize("mode", [loader_pb2.MODE_LOAD, loader_pb2.MODE_DIGEST])
def test_tied_weights_that_differ_are_refused(
    mode: int, loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    config = {**tiny_config, "tie_word_embeddings": True}
    weights = tiny_weights(config)
    weights["lm_head.weight"] = weights[EMBEDDING] + 1
    folder = write_llama(config, weights)
    outcome = loader.load(folder, mode=mode)
    assert outcome.returncode == 1
    assert outcome.failed.reason == weight_cache_pb2.BAD_CHECKPOINT
    assert f"{folder / 'model.safetensors'}: tensor 'lm_head.weight' differs" in outcome.failed.message
    assert outcome.failed.fields["tensor"] == "lm_head.weight"


@pytest.fixture
def tiny_gguf(write_gguf: Any, tiny_config: Any, tiny_weights: Any) -> tuple[Path, dict[str, Any]]:
    """A GGUF with attention biases and rope divisors, and its weights in Hugging Face's row order."""
    config = {**tiny_config, "tie_word_embeddings": True, "attention_bias": True}
    weights = tiny_weights(config)
    weights["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    return write_gguf(config, weights)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_rows_of_gguf_are_back_in_order_and_rope_divisors_are_a_buffer(
    compute_dtype: str, loader: Any, tiny_gguf: tuple[Path, dict[str, np.ndarray[Any, Any]]]
) -> None:
    path, weights = tiny_gguf
    outcome = loader.load(path, Recipe(compute_dtype=compute_dtype))
    assert_consistent(outcome)
    for name, expected in weights.items():
        is_vector = expected.ndim == 1 and name != "rope_freqs.weight"
        assert outcome.entry(name).dtype == (compute_dtype if is_vector else "float32")
        bound = ERROR_BOUND["bf16"] if is_vector and compute_dtype == "bfloat16" else 0.0
        assert relative_error(weight(outcome, name), expected) <= bound, name
    assert outcome.entry("rope_freqs.weight").kind == weight_cache_pb2.TENSOR_KIND_BUFFER


def test_rope_divisors_and_a_scaling_override_exclude_each_other(
    loader: Any, tiny_gguf: tuple[Path, dict[str, np.ndarray[Any, Any]]]
) -> None:
    overrides = {"rope_scaling": {"rope_type": "linear", "factor": 2}}
    outcome = loader.load(tiny_gguf[0], Recipe(config_overrides=overrides))
    assert outcome.returncode == 1
    assert "would scale it twice" in outcome.failed.message


BLOCK_HALVES = {"q4_1": [0, 2], "q5_1": [0, 2], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208]}


def random_stored(name: str, shape: tuple[int, ...]) -> tuple[int, bytes, np.ndarray[Any, Any]]:
    """A matrix of some GGUF type with random bytes: type, bytes, and what the gguf package makes of them."""
    number = next(number for number, kind in GGUF_TYPES.items() if kind.name == name)
    kind, rng = GGUF_TYPES[number], np.random.default_rng(shape[0])
    values = rng.normal(0, 0.05, shape)
    if name == "f16":
        raw = values.astype(np.float16)
    elif name in ("bf16", "f32"):
        raw = values.astype(np.float32)
        raw = (raw.view(np.uint32) >> 16).astype(np.uint16) if name == "bf16" else raw
    else:
        raw = rng.integers(0, 256, (shape[0], shape[1] // kind.block_size, kind.block_bytes), dtype=np.uint8)
        for start in BLOCK_HALVES.get(name, [0]):
            halves = rng.normal(0, 0.05, (*raw.shape[:2], 1)).astype(np.float16)
            raw[..., start : start + 2] = halves.view(np.uint8)
    stored = raw.reshape(shape[0], -1)
    reference = gguf.quants.dequantize(stored.view(np.uint8), gguf.GGMLQuantizationType(number))
    return number, stored.tobytes(), reference.astype(np.float32)


@pytest.mark.parametrize("name", [kind.name for kind in GGUF_TYPES.values()])
def test_every_gguf_type_is_kept_and_converted(
    name: str, loader: Any, tiny_config: Any, tiny_weights: Any, write_gguf: Any
) -> None:
    config = {**tiny_config, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 16}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    path, weights = write_gguf(config, tiny_weights(config), lambda array: random_stored(name, array.shape))
    for quantization in ("keep", "f32"):
        outcome = loader.load(path, Recipe(quantization=quantization))
        assert_consistent(outcome)
        for tensor, expected in weights.items():
            assert relative_error(weight(outcome, tensor), expected) == 0.0, (quantization, tensor)


def test_values_that_are_not_finite_are_not_quantized(
    loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    weights = tiny_weights(tiny_config)
    weights[EMBEDDING][3, 5] = np.inf
    outcome = loader.load(write_llama(tiny_config, weights), Recipe(quantization="int8_per_channel"))
    assert outcome.returncode == 1
    assert f"tensor {EMBEDDING!r} holds values that are not finite" in outcome.failed.message


def test_a_file_that_changes_during_the_load_is_refused(
    loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    outcome = loader.load(folder, before_grant=lambda: os.utime(folder / "model.safetensors"))
    assert outcome.returncode == 1
    assert outcome.failed.reason == weight_cache_pb2.CHECKPOINT_CHANGED
    assert f"{folder / 'model.safetensors'} changed while it was read" in outcome.failed.message


def test_a_file_cut_during_the_load_is_refused(
    loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    outcome = loader.load(folder, before_grant=lambda: os.truncate(folder / "model.safetensors", 9000))
    assert outcome.returncode == 1
    assert outcome.failed.reason == weight_cache_pb2.CHECKPOINT_CHANGED


def test_a_fault_is_told_with_its_reason(loader: Any, tmp_path: Path) -> None:
    outcome = loader.load(tmp_path / "nowhere")
    assert outcome.returncode == 1
    assert outcome.failed.reason == weight_cache_pb2.CHECKPOINT_NOT_FOUND
    assert str(tmp_path / "nowhere") in outcome.failed.message
    assert outcome.plan is None


@pytest.mark.parametrize("size", ["tp_size", "pp_size", "ep_size", "dp_size"])
def test_a_part_of_a_model_is_refused_by_its_size(size: str, loader: Any, demo_model: Path) -> None:
    outcome = loader.load(demo_model, rank=weight_cache_pb2.Rank(**{size: 2}))
    assert outcome.failed.reason == weight_cache_pb2.BAD_REQUEST
    assert f"{size}=2 is not supported" in outcome.failed.message


def test_progress_ends_at_the_total_and_phases_follow_each_other(loader: Any, demo_model: Path) -> None:
    outcome = loader.load(demo_model)
    last = outcome.progress[-1]
    assert (last.phase, last.done_bytes) == ("read", last.total_bytes)
    done = [progress.done_bytes for progress in outcome.progress]
    assert done == sorted(done)
    phases = list(outcome.committed.phases)
    assert [phase.name for phase in phases] == ["exec", "imports", "open", "plan", "grant", "read", "commit"]
    assert all(a.end_ns <= b.start_ns or a.name == "exec" for a, b in itertools.pairwise(phases))


def test_a_kept_load_imports_neither_torch_nor_numpy(loader: Any, demo_model: Path) -> None:
    libraries: list[str] = []

    def look(process: Any) -> None:
        libraries.append(Path(f"/proc/{process.pid}/maps").read_text())

    outcome = loader.load(demo_model, on_progress=look)
    assert outcome.returncode == 0
    assert libraries
    assert "libtorch" not in libraries[-1]
    assert "_multiarray_umath" not in libraries[-1]


def private_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


@pytest.mark.parametrize(("quantization", "extra"), [("keep", 24 << 20), ("int8_per_channel", 128 << 20)])
def test_private_memory_does_not_grow_with_the_checkpoint(
    quantization: str, extra: int, loader: Any, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    """Two checkpoints, a small one and one of 400 MB: their loaders' private memory differs by little."""
    peaks = []
    for vocab_size in (1000, 100_000):
        config = {**tiny_config, "hidden_size": 512, "vocab_size": vocab_size}
        folder = write_llama(config, tiny_weights(config), name=f"v{vocab_size}")
        seen = [0]
        outcome = loader.load(
            folder,
            Recipe(quantization=quantization),
            on_progress=lambda process, seen=seen: seen.append(private_bytes(process.pid)),
        )
        assert outcome.returncode == 0, outcome.stderr
        peaks.append(max(seen))
    assert peaks[1] - peaks[0] < extra


def test_the_loader_ends_when_the_daemon_is_gone(loader: Any, demo_model: Path) -> None:
    process, control = loader.spawn()
    job = loader_pb2.Job(checkpoint_path=str(demo_model), recipe=Recipe().to_proto())
    socket.send_fds(control, [job.SerializeToString()], [])
    assert loader_pb2.Update.FromString(control.recv(65536)).HasField("plan")
    control.close()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr == b""


def test_a_grant_of_the_wrong_size_is_refused(loader: Any, demo_model: Path) -> None:
    process, control = loader.spawn()
    job = loader_pb2.Job(checkpoint_path=str(demo_model), recipe=Recipe().to_proto())
    socket.send_fds(control, [job.SerializeToString()], [])
    control.recv(65536)
    segment = os.memfd_create("small")
    socket.send_fds(control, [b""], [segment])
    failed = loader_pb2.Update.FromString(control.recv(65536)).failed
    control.close()
    os.close(segment)
    process.communicate(timeout=60)
    assert "granted segments of [0] bytes" in failed.message


def test_a_second_layout_version_is_refused(loader: Any, demo_model: Path) -> None:
    process, control = loader.spawn()
    recipe = Recipe().to_proto()
    recipe.layout_version = 99
    control.send(loader_pb2.Job(checkpoint_path=str(demo_model), recipe=recipe).SerializeToString())
    failed = loader_pb2.Update.FromString(control.recv(65536)).failed
    control.close()
    process.communicate(timeout=60)
    assert failed.reason == weight_cache_pb2.BAD_REQUEST
    assert "layout version 99" in failed.message
