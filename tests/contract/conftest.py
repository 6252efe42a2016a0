"""Fixtures for the contract: processes that hold leases, loaders that can be stopped, and checkpoints to break."""

from __future__ import annotations

import json
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from preload.engine.errors import PreloadError
from preload.protos import weight_cache_pb2 as pb
from preload.protos import weight_cache_pb2_grpc as pb_grpc

FAKES = Path(__file__).parents[1] / "fakes"
DEADLINE_S = 60.0

Stored = tuple[str, list[int], bytes]
"""What a safetensors file says of a tensor: dtype, shape and bytes."""


class Holder:
    """A process with a lease, and what it said so far."""

    def __init__(self, runtime_dir: Path, **options: Any) -> None:
        text = json.dumps({"runtime_dir": str(runtime_dir), "tensors": "buffers", **options}, default=str)
        self.process = subprocess.Popen(
            [sys.executable, FAKES / "holder.py", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.kept: list[dict[str, Any]] = []
        self.opening = self._next()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def generation(self) -> str:
        return str(self.opening["generation"])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _next(self) -> dict[str, Any]:
        said = self._said.get(timeout=DEADLINE_S)
        assert said is not None, f"the holder ended with {self.process.wait()}"
        return said

    def ask(self, command: str) -> Any:
        """The answer to a command; events that come in between are kept."""
        self.tell(command)
        while "event" in (said := self._next()):
            self.kept.append(said)
        return next(iter(said.values()))

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def event(self) -> tuple[str, str]:
        """The next lease event: kind and detail."""
        said = self.kept.pop(0) if self.kept else self._next()
        return said["event"], said["detail"]

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def hold() -> Iterator[Callable[..., Holder]]:
    """Starts processes that attach; all are gone when the test ends."""
    holders: list[Holder] = []

    def start(daemon: Any, checkpoint: Path | str | None = None, **options: Any) -> Holder:
        if checkpoint is not None:
            options["checkpoint"] = str(checkpoint)
        holders.append(Holder(daemon.runtime_dir, **options))
        return holders[-1]

    yield start
    for holder in holders:
        holder.end()
        for stream in (holder.process.stdin, holder.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def stub_of() -> Iterator[Callable[[Any], Any]]:
    """A bare gRPC stub of a daemon, for what our client would never send."""
    channels = []

    def make(daemon: Any) -> Any:
        channels.append(grpc.insecure_channel(f"unix:{daemon.runtime_dir / 'daemon.sock'}"))
        return pb_grpc.WeightCacheStub(channels[-1])

    yield make
    for channel in channels:
        channel.close()


@dataclass
class Gate:
    """Holds up the loaders of one daemon: see tests/fakes/gated_loader.py."""

    folder: Path
    wait_for: Callable[..., Any]

    HEADER = 100
    """Bytes after which the header is read and the first tensor is not."""

    def stop_at(self, num_bytes: int) -> None:
        (self.folder / "waiting").unlink(missing_ok=True)
        (self.folder / "stop_at").write_text(str(num_bytes))

    def loader_pid(self) -> int:
        """The loader that waits at the gate now."""
        waiting = self.folder / "waiting"
        return int(self.wait_for(lambda: waiting.exists() and waiting.read_text(), "a loader at the gate"))

    def open(self) -> None:
        (self.folder / "stop_at").unlink(missing_ok=True)

    def set(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def command(self, **settings: Any) -> list[str]:
        """A daemon whose loaders pass this gate."""
        loader = [sys.executable, str(FAKES / "gated_loader.py"), str(self.folder)]
        return [sys.executable, str(FAKES / "run_daemon.py"), json.dumps({"loader_command": loader, **settings})]


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory, wait_for: Callable[..., Any]) -> Iterator[Gate]:
    made = Gate(tmp_path_factory.mktemp("gate"), wait_for)
    yield made
    made.open()


@pytest.fixture
def gated_daemon(make_daemon: Callable[..., Any], gate: Gate) -> Any:
    return make_daemon("--drain-timeout-s", "0.2", command=gate.command())


class LoadCall:
    """A Load rpc in a thread of its own, which a test can watch and cancel."""

    def __init__(self, stub: Any, request: Any) -> None:
        self.call = stub.Load(request, timeout=DEADLINE_S)
        self.progress: list[Any] = []
        self.loaded: Any = None
        self.error: grpc.RpcError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self.call:
                if event.WhichOneof("event") == "loaded":
                    self.loaded = event.loaded
                else:
                    self.progress.append(event.progress)
        except grpc.RpcError as error:
            self.error = error

    def join(self) -> LoadCall:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the Load rpc goes on"
        return self


@pytest.fixture
def start_load(stub_of: Callable[[Any], Any]) -> Callable[..., LoadCall]:
    def start(daemon: Any, path: Path | str, **recipe: Any) -> LoadCall:
        from preload.engine.recipe import Recipe

        request = pb.LoadRequest(checkpoint_path=str(path), recipe=Recipe(**recipe).to_proto())
        return LoadCall(stub_of(daemon), request)

    return start


@dataclass
class LlamaFiles:
    """A tiny random Llama on disk: 2 layers, hidden size 64, untied unless `config` says otherwise."""

    write: Callable[..., Path]
    config: dict[str, Any] = field(
        default_factory=lambda: {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    )

    def tensors(self, seed: int = 0) -> dict[str, Stored]:
        """Everything the model needs, in F32."""
        random = np.random.default_rng(seed)

        def stored(*shape: int) -> Stored:
            values = random.standard_normal(shape, dtype=np.float32)
            return "F32", list(shape), values.tobytes()

        found = {"model.embed_tokens.weight": stored(128, 64), "model.norm.weight": stored(64)}
        shapes = {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_proj": (96, 64),
            "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96),
            "input_layernorm": (64,),
            "post_attention_layernorm": (64,),
        }
        for layer in range(2):
            found |= {f"model.layers.{layer}.{name}.weight": stored(*shape) for name, shape in shapes.items()}
        return {**found, "lm_head.weight": stored(128, 64)}

    def folder(self, path: Path, tensors: Mapping[str, Stored] | None = None, **config: Any) -> Path:
        """A folder with one model.safetensors and its config.json."""
        path.mkdir(parents=True, exist_ok=True)
        self.write(path / "model.safetensors", self.tensors() if tensors is None else tensors)
        (path / "config.json").write_text(json.dumps({**self.config, **config}))
        return path

    def sharded(self, path: Path, tensors: Mapping[str, Stored], num_shards: int = 2) -> Path:
        """The same, dealt out to shards with an index."""
        path.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        for shard in range(num_shards):
            name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            part = {key: value for i, (key, value) in enumerate(tensors.items()) if i % num_shards == shard}
            self.write(path / name, part)
            weight_map |= dict.fromkeys(part, name)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (path / "config.json").write_text(json.dumps(self.config))
        return path


@pytest.fixture
def llama(write_safetensors: Callable[..., Path]) -> LlamaFiles:
    return LlamaFiles(write_safetensors)


@dataclass
class FaultyFiles:
    """What a fault is built from: a folder with a good model in it, and the makers of parts of it."""

    folder: Path
    llama: Any
    write: Callable[..., Path]

    @property
    def weights(self) -> Path:
        return self.folder / "model.safetensors"

    def model(self, change: Callable[[dict[str, Any]], Any] = lambda tensors: None, **config: Any) -> Path:
        """The model after a change of its tensors."""
        tensors = self.llama.tensors()
        change(tensors)
        folder: Path = self.llama.folder(self.folder, tensors, **config)
        return folder

    def header(self, header: object, data: bytes = bytes(64), num_bytes: int | None = None) -> Path:
        """A raw safetensors file with exactly that header; `num_bytes` is what it claims as the header's size."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = self.folder / "raw.safetensors"
        size = len(text) if num_bytes is None else num_bytes
        path.write_bytes(size.to_bytes(8, "little") + text + data)
        return path


@pytest.fixture
def files(tmp_path: Path, llama: Any, write_safetensors: Callable[..., Path]) -> FaultyFiles:
    folder = tmp_path / "faulty"
    folder.mkdir()
    return FaultyFiles(folder, llama, write_safetensors)


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[int, list[int], bytes]],
    *,
    magic: bytes = b"GGUF",
    metadata: Mapping[str, Any] | None = None,
    offsets: Mapping[str, int] | None = None,
) -> Path:
    """Writes (type id, row-major shape, bytes) by name; `metadata` of str, int and float; `offsets` in place of
    the right ones."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def pair(key: str, value: Any) -> bytes:
        if isinstance(value, str):
            return text(key) + struct.pack("<I", 8) + text(value)
        code, kind = ("f", 6) if isinstance(value, float) else ("I", 4)
        return text(key) + struct.pack(f"<I{code}", kind, value)

    metadata = {"general.architecture": "llama", **(metadata or {})}
    header = magic + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(pair(key, value) for key, value in metadata.items())
    data = b""
    for name, (type_id, shape, content) in tensors.items():
        offset = (offsets or {}).get(name, len(data))
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], type_id, offset)
        data += content + b"\0" * (-len(content) % 32)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


@pytest.fixture(name="write_gguf")
def write_gguf_fixture() -> Callable[..., Path]:
    return write_gguf


@pytest.fixture
def check_refusal() -> Callable[..., None]:
    """Loads a faulty checkpoint and looks at everything that a refusal must leave in order."""

    def check(
        daemon: Any, path: Path, error: type[PreloadError], words: Sequence[str], good: Path, **recipe: Any
    ) -> None:
        before = daemon.device()
        with pytest.raises(error) as refusal:
            daemon.load(path, **recipe)
        assert type(refusal.value) is error
        for word in words:
            assert word in refusal.value.message
        assert daemon.device() == before
        (failed,) = [g for g in daemon.generations() if list(g.checkpoint_paths) == [str(path)]]
        assert failed.state == pb.GENERATION_STATE_FAILED
        assert failed.resident_bytes == 0
        assert (failed.failure.reason, failed.failure.message) == (error.reason, refusal.value.message)
        loaded = daemon.load(good, model="raw")
        assert loaded.state == pb.GENERATION_STATE_READY
        with daemon.control() as control:
            control.evict(pb.Selector(generation_id=loaded.id))
        assert daemon.device() == before

    return check
