"""Fixtures for the loader's tests: the daemon's side of its protocol, and checkpoints of every kind."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preload.engine.recipe import Recipe
from preload.protos import loader_pb2, weight_cache_pb2

DEADLINE_S = 120.0
NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "uint8": np.uint8,
                "int8": np.int8, "float8_e4m3fn": np.uint8, "int64": np.int64, "float64": np.float64,
                "bool": np.bool_}  # fmt: skip


@dataclass
class Outcome:
    """What a loader said, and the memory it filled."""

    returncode: int = -1
    stderr: str = ""
    progress: list[weight_cache_pb2.Progress] = field(default_factory=list)
    plan: loader_pb2.Plan | None = None
    committed: loader_pb2.Committed | None = None
    digested: loader_pb2.Digested | None = None
    verified: loader_pb2.VerifyResult | None = None
    failed: weight_cache_pb2.ErrorInfo | None = None
    manifest: weight_cache_pb2.Manifest | None = None
    manifest_fd: int = -1
    receipts: list[weight_cache_pb2.Receipt] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)

    def entry(self, name: str) -> weight_cache_pb2.Tensor:
        assert self.manifest is not None
        return next(tensor for tensor in self.manifest.tensors if tensor.name == name)

    def raw(self, name: str) -> bytes:
        entry = self.entry(name)
        return os.pread(self.segments[entry.segment], entry.num_bytes, entry.offset)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor; bfloat16 as its uint16 bits, float8 as its bytes."""
        entry = self.entry(name)
        return np.frombuffer(self.raw(name), NUMPY_DTYPES[entry.dtype]).reshape(tuple(entry.shape))


class LoaderSide:
    """Spawns loaders and closes what they leave behind."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(DEADLINE_S)
        command = [sys.executable, "-P", "-m", "preload.engine.loading.loader", "--control-fd", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        theirs.close()
        self._processes.append(process)
        return process, ours

    def load(
        self,
        path: object,
        recipe: Recipe | None = None,
        *,
        mode: int = loader_pb2.MODE_LOAD,
        rank: weight_cache_pb2.Rank | None = None,
        num_threads: int = 2,
        before_grant: Callable[[], None] | None = None,
        on_progress: Callable[[subprocess.Popen[bytes]], None] | None = None,
    ) -> Outcome:
        """One job, to its end."""
        job = loader_pb2.Job(
            mode=mode,  # type: ignore[arg-type]
            checkpoint_path=str(path),
            recipe=(recipe or Recipe()).to_proto(),
            rank=rank,
            spawned_at_ns=time.monotonic_ns(),
            num_threads=num_threads,
        )
        return self._exchange(job, [], before_grant, on_progress)

    def verify(self, loaded: Outcome) -> Outcome:
        job = loader_pb2.Job(mode=loader_pb2.MODE_VERIFY, num_threads=2)
        return self._exchange(job, [loaded.manifest_fd, *loaded.segments], None, None)

    def _exchange(
        self,
        job: loader_pb2.Job,
        job_fds: list[int],
        before_grant: Callable[[], None] | None,
        on_progress: Callable[[subprocess.Popen[bytes]], None] | None,
    ) -> Outcome:
        process, control = self.spawn()
        outcome = Outcome()
        with control:
            socket.send_fds(control, [job.SerializeToString()], job_fds)
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(control, 64 << 10, 253)
                except ConnectionResetError:
                    break
                if not data:
                    break
                self._fds += fds
                update = loader_pb2.Update.FromString(data)
                kind = update.WhichOneof("update")
                if kind == "progress":
                    outcome.progress.append(update.progress)
                    if on_progress:
                        on_progress(process)
                elif kind == "plan":
                    outcome.plan = update.plan
                    if before_grant:
                        before_grant()
                    outcome.segments = [self._memfd(size) for size in update.plan.segment_bytes]
                    socket.send_fds(control, [loader_pb2.Grant().SerializeToString()], outcome.segments)
                else:
                    assert kind is not None
                    setattr(outcome, kind, getattr(update, kind))
                    self._read_memfds(outcome, fds)
        _, stderr = process.communicate(timeout=DEADLINE_S)
        outcome.returncode, outcome.stderr = process.returncode, stderr.decode()
        return outcome

    def _read_memfds(self, outcome: Outcome, fds: list[int]) -> None:
        if outcome.committed is not None:
            outcome.manifest_fd = fds[0]
            outcome.manifest = weight_cache_pb2.Manifest.FromString(_content(fds[0]))
        if fds:
            outcome.receipts = list(loader_pb2.Receipts.FromString(_content(fds[-1])).receipts)

    def _memfd(self, size: int) -> int:
        fd = os.memfd_create("segment")
        os.ftruncate(fd, size)
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for fd in self._fds:
            os.close(fd)


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.fixture
def loader() -> Iterator[LoaderSide]:
    side = LoaderSide()
    yield side
    side.close()


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """The configuration of a Llama with two small layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 100,
    }


@pytest.fixture
def tiny_weights() -> Callable[..., dict[str, np.ndarray[Any, Any]]]:
    """Random float32 weights of a configuration, by canonical name."""

    def make(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
        from preload.engine.models.configs import spec_from_config
        from preload.engine.models.llama_names import expected_tensors

        rng = np.random.default_rng(seed)
        expected = expected_tensors(spec_from_config(config, "config.json"))
        return {name: rng.normal(0, 0.1, t.shape).astype(np.float32) for name, t in expected.items()}

    return make


@pytest.fixture
def write_llama(tmp_path: Path) -> Callable[..., Path]:
    """A folder with config.json and weights, in one file or in shards with an index."""

    def write(
        config: Mapping[str, Any] | None,
        weights: Mapping[str, np.ndarray[Any, Any]],
        num_shards: int = 0,
        name: str = "model",
    ) -> Path:
        from safetensors.numpy import save_file

        folder = tmp_path / name
        folder.mkdir(parents=True)
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        if not num_shards:
            save_file(dict(weights), folder / "model.safetensors")
            return folder
        weight_map = {}
        for shard in range(num_shards):
            file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            part = {key: weights[key] for key in list(weights)[shard::num_shards]}
            save_file(part, folder / file_name)
            weight_map.update(dict.fromkeys(part, file_name))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


@pytest.fixture
def gguf_bytes() -> Callable[..., bytes]:
    """A GGUF file byte for byte. `tensors`: (name, dimensions as stored, type, data, offset or None)."""

    def build(
        tensors: list[tuple[str, tuple[int, ...], int, bytes, int | None]],
        pairs: Mapping[str, tuple[int, bytes]] | None = None,
        version: int = 3,
        alignment: int = 32,
    ) -> bytes:
        pairs = pairs or {}
        head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
        for key, (type_id, value) in pairs.items():
            head += gguf_string(key) + struct.pack("<I", type_id) + value
        data = b""
        for name, dims, type_id, content, offset in tensors:
            data += bytes(-len(data) % alignment)
            head += gguf_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            head += struct.pack("<IQ", type_id, len(data) if offset is None else offset)
            data += content
        return head + bytes(-len(head) % alignment) + data

    return build


_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return _GGUF_NAMES.get(name, name)
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    ours, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[ours]}.{kind}"


def _is_permuted(name: str) -> bool:
    return "q_proj" in name or "k_proj" in name


@pytest.fixture
def write_gguf(tmp_path: Path, gguf_bytes: Callable[..., bytes]) -> Callable[..., Any]:
    """A Llama as llama.cpp's converter writes it; returns its path, and its weights in Hugging Face's row order.

    `encode(array)` gives a matrix's type, bytes and values; without it, everything is stored as float32.
    """

    def write(
        config: Mapping[str, Any], weights: Mapping[str, np.ndarray[Any, Any]], encode: Any = None
    ) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
        half = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
        tensors, values = [], {}
        for name, array in weights.items():
            stored = array
            if _is_permuted(name):
                stored = array.reshape(-1, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            type_id, data = 0, stored.tobytes()
            if encode is not None and array.ndim == 2:
                type_id, data, stored = encode(stored)
            tensors.append((_gguf_name(name), array.shape[::-1], type_id, data, None))
            if _is_permuted(name):
                stored = stored.reshape(-1, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            values[name] = stored
        pairs = {"general.architecture": (8, gguf_string("llama"))}
        for key, ours in {
            "block_count": "num_hidden_layers",
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "attention.head_count_kv": "num_key_value_heads",
        }.items():
            pairs[f"llama.{key}"] = (4, struct.pack("<I", config[ours]))
        path = tmp_path / "tiny.gguf"
        path.write_bytes(gguf_bytes(tensors, pairs))
        return path, values

    return write
