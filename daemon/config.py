"""The daemon's configuration: one dataclass, its command-line help, and the TOML file behind it.

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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .errors import BadRequestError
from .generations import Rank, Recipe, Source
from .runtime_folder import default_runtime_dir


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Everything `preload daemon` can be told."""

    runtime_dir: str = field(
        default_factory=default_runtime_dir, metadata={"help": "folder of the sockets, made with mode 0700"}
    )
    config: str = field(default="", metadata={"help": "TOML file; the command line goes before it"})
    host_limit: str = field(
        default="80%", metadata={"help": "host memory for weights: a share (80%%) or a size (64G)"}
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
    unknown = set(table) - {"daemon", "models"}
    if unknown:
        raise BadRequestError(f"configuration {path}: unknown table {sorted(unknown)[0]!r}")
    if not isinstance(table.get("daemon", {}), dict) or not _is_list_of_tables(table.get("models", [])):
        raise BadRequestError(f"configuration {path}: it has one table [daemon] and any number of [[models]]")
    settings = _settings(path, table.get("daemon", {}))
    models = tuple(_model(path, entry, layout_version) for entry in table.get("models", []))
    return replace(DaemonConfig(**{**settings, **overrides}), models=models)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _settings(path: str, table: dict[str, Any]) -> dict[str, Any]:
    known = {f.name: f for f in fields(DaemonConfig) if f.metadata.get("cli", True) and f.name != "config"}
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise BadRequestError(f"configuration {path}: unknown key daemon.{key}")
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
    known = {"checkpoint", "model", "quantization", "compute_dtype", "config_overrides"}
    unknown = set(entry) - known
    if unknown:
        raise BadRequestError(f"configuration {path}: unknown key models.{sorted(unknown)[0]}")
    checkpoint = entry.get("checkpoint", "")
    if not isinstance(checkpoint, str) or not os.path.isabs(checkpoint) or ".." in checkpoint.split("/"):
        raise BadRequestError(f"configuration {path}: models.checkpoint must be an absolute path without ..")
    names = {"model": "auto", "quantization": "keep", "compute_dtype": "float32"}
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
    recipe = Recipe(**names, config_overrides=text, layout_version=layout_version)
    return Source(os.path.normpath(checkpoint), recipe, Rank())
