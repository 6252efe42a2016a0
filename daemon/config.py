"""The daemon's configuration: one dataclass, its command-line help, and the TOML file behind it.

Every value is checked here, wherever it came from; whether an address is free or a model is there is found out by
whoever uses them.

[daemon]
host_limit = "80%"
http_port = 8470
allow_uids = [1000]

[[models]]
checkpoint = "/models/smollm2.gguf"
quantization = "keep"
config_overrides = { rope_theta = 1e6 }
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .capacity import parse_limit, physical_host_bytes
from .devices import CUDA_VMM, DEVICE_MEMORIES, HOST, checked_name
from .errors import BadRequestError
from .generations import Rank, Recipe, Source
from .runtime_folder import default_runtime_dir

_MODEL_KEYS = ("checkpoint", "model", "quantization", "compute_dtype", "config_overrides", "device")
_MAX_ID = 0xFFFFFFFE
_MAX_THREADS = 1024
_RANGES: dict[str, tuple[float, float]] = {
    "http_port": (0, 65535),
    "max_loaders": (1, _MAX_THREADS),
    "loader_threads": (0, _MAX_THREADS),
    "ticket_ttl_s": (0, 3600),
    "drain_timeout_s": (0, 3600),
    "reclaim_timeout_s": (0, 86400),
}
"""Least and most of each number."""


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Everything `preload daemon` can be told. Raises BadRequestError naming a field whose value is impossible."""

    runtime_dir: str = field(
        default_factory=default_runtime_dir, metadata={"help": "folder of the sockets, made with mode 0700"}
    )
    config: str = field(default="", metadata={"help": "TOML file; the command line goes before it"})
    host_limit: str = field(
        default="80%", metadata={"help": "host memory for weights: a share (80%%) or a size (64G)"}
    )
    device_limit: str = field(
        default="90%", metadata={"help": "memory of each GPU for weights: a share (90%%) or a size (64G)"}
    )
    device_memory: str = field(
        default=CUDA_VMM,
        metadata={
            "help": "how memory of GPUs is shared: cuda_vmm (descriptors), or cuda_ipc (handles of a holder process, "
            "where the driver exports no descriptors)",
            "choices": DEVICE_MEMORIES,
        },
    )
    http_host: str = field(default="127.0.0.1", metadata={"help": "address of /health, /ready and /metrics"})
    http_port: int = field(default=8470, metadata={"help": "port of /health, /ready and /metrics; 0 = any free"})
    allow_uids: tuple[int, ...] = field(
        default=(), metadata={"help": "user ids besides the daemon's own and root that may come in"}
    )
    allow_gids: tuple[int, ...] = field(default=(), metadata={"help": "group ids whose members may come in"})
    max_loaders: int = field(default=2, metadata={"help": "loader processes at a time"})
    loader_threads: int = field(default=0, metadata={"help": "threads of a loader; 0 = one per core"})
    ticket_ttl_s: float = field(default=10.0, metadata={"help": "seconds a ticket for descriptors is good for"})
    drain_timeout_s: float = field(default=5.0, metadata={"help": "seconds given to clients when stopping"})
    reclaim_timeout_s: float = field(
        default=30.0, metadata={"help": "seconds that holders of leases have to come back after a restart"}
    )
    models: tuple[Source, ...] = field(default=(), metadata={"cli": False})
    loader_command: tuple[str, ...] = field(
        default=(sys.executable, "-P", "-m", "preload.engine.loading.loader"), metadata={"cli": False}
    )

    def __post_init__(self) -> None:
        for name in ("runtime_dir", "http_host"):
            text = getattr(self, name)
            if not text or "\0" in text:
                raise BadRequestError(f"{name} must not be {'empty' if not text else repr(text)}")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:  # nor is a NaN
                raise BadRequestError(f"{name} must be between {least:g} and {most:g}, not {value}")
        for name in ("allow_uids", "allow_gids"):
            for number in getattr(self, name):
                if not 0 <= number <= _MAX_ID:
                    raise BadRequestError(f"{name}: {number} is no id; ids run from 0 to {_MAX_ID}")
        if self.device_memory not in DEVICE_MEMORIES:
            known = ", ".join(DEVICE_MEMORIES)
            raise BadRequestError(f"device_memory must be one of {known}, not {self.device_memory!r}")
        for name in ("host_limit", "device_limit"):
            try:
                parse_limit(getattr(self, name), physical_host_bytes())
            except BadRequestError as error:
                raise BadRequestError(f"{name}: {error.message}") from error

    def warnings(self) -> list[str]:
        """What can be, and is hardly meant."""
        physical_bytes = physical_host_bytes()
        limit_bytes = parse_limit(self.host_limit, physical_bytes)
        if limit_bytes <= physical_bytes:
            return []
        return [f"host_limit {self.host_limit} is {limit_bytes:,} bytes, more than this host's {physical_bytes:,}"]


def read_config(path: str, overrides: dict[str, Any], layout_version: int) -> DaemonConfig:
    """The file's settings under those of the command line. An empty path is no file; `layout_version` is that
    of the engine installed beside the daemon.

    Raises BadRequestError naming the file and the key that is wrong."""
    if not path:
        return DaemonConfig(**overrides)
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise BadRequestError(f"configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"configuration {path}: {error}") from error
    _check_shape(path, table)
    settings = _settings(path, table.get("daemon", {}))
    try:
        DaemonConfig(**settings)
    except BadRequestError as error:
        raise BadRequestError(f"configuration {path}: daemon.{error.message}") from error
    models = tuple(_model(path, entry, layout_version) for entry in table.get("models", []))
    return replace(DaemonConfig(**{**settings, **overrides}), models=models)


def _check_shape(path: str, table: dict[str, Any]) -> None:
    for key in table:
        if key in _known_settings():
            raise BadRequestError(f"configuration {path}: {key} belongs under a line [daemon]")
        if key in _MODEL_KEYS:
            raise BadRequestError(f"configuration {path}: {key} belongs under a line [[models]]")
        if key not in ("daemon", "models"):
            raise BadRequestError(f"configuration {path}: unknown table {key!r}; known are [daemon] and [[models]]")
    if not isinstance(table.get("daemon", {}), dict):
        raise BadRequestError(f"configuration {path}: it has one table [daemon], not daemon = {table['daemon']!r}")
    if not _is_list_of_tables(table.get("models", [])):
        raise BadRequestError(
            f"configuration {path}: it has any number of [[models]], each followed by lines such as "
            'checkpoint = "/models/chat.gguf"; [models] and models = … are something else'
        )


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _known_settings() -> dict[str, Field[Any]]:
    """What a line under [daemon] may set, by name."""
    return {f.name: f for f in fields(DaemonConfig) if f.metadata.get("cli", True) and f.name != "config"}


def _settings(path: str, table: dict[str, Any]) -> dict[str, Any]:
    known = _known_settings()
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise BadRequestError(f"configuration {path}: unknown key daemon.{key}; known are {', '.join(known)}")
        if key in ("allow_uids", "allow_gids"):
            if not isinstance(value, list) or not all(type(uid) is int for uid in value):
                raise BadRequestError(f"configuration {path}: daemon.{key} must be a list of numbers")
            settings[key] = tuple(value)
            continue
        wanted: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
        if type(value) not in wanted[str(known[key].type)]:
            raise BadRequestError(f"configuration {path}: daemon.{key} must be of type {known[key].type}")
        settings[key] = value
    return settings


def _model(path: str, entry: dict[str, Any], layout_version: int) -> Source:
    unknown = sorted(set(entry) - set(_MODEL_KEYS))
    if unknown:
        raise BadRequestError(
            f"configuration {path}: unknown key models.{unknown[0]}; known are {', '.join(_MODEL_KEYS)}"
        )
    checkpoint = entry.get("checkpoint", "")
    if not isinstance(checkpoint, str) or not os.path.isabs(checkpoint) or ".." in checkpoint.split("/"):
        raise BadRequestError(f"configuration {path}: models.checkpoint must be an absolute path without ..")
    names = {"model": "auto", "quantization": "keep", "compute_dtype": "float32", "device": HOST}
    for key in names:
        names[key] = entry.get(key, names[key])
        if not isinstance(names[key], str):
            raise BadRequestError(f"configuration {path}: models.{key} must be a string")
    overrides = entry.get("config_overrides", {})
    if not isinstance(overrides, dict):
        raise BadRequestError(f"configuration {path}: models.config_overrides must be a table of keys to replace")
    # Engines send canonical JSON, and recipes are compared as text.
    try:
        text = json.dumps(overrides, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if overrides else ""
    except TypeError as error:
        raise BadRequestError(f"configuration {path}: models.config_overrides: {error}") from error
    device = names.pop("device")
    try:
        checked_name(device)
    except BadRequestError as error:
        raise BadRequestError(f"configuration {path}: models.device: {error.message}") from error
    recipe = Recipe(**names, config_overrides=text, layout_version=layout_version)
    return Source(os.path.normpath(checkpoint), recipe, Rank(), device)
