"""`CoreConfig`: everything an engine core is told, each field declared once with its help text.

The frontend starts `python -m preload.engine.core --config-json '<json>'`; this module is what both sides share,
so it imports neither torch nor grpc.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from preload.engine.errors import RequestError
from preload.engine.recipe import Recipe

from .speculation import options

EXIT_BAD_CONFIG = 2
"""Exit code of a core that is told what it, or this model, cannot do: another one could not either."""

DEFAULT_MAX_MODEL_LEN = 8192
"""What `max_model_len=0` means for a model that allows more: longer sequences are asked for explicitly, because
the KV cache has to hold at least one of full length."""


POLICIES = ("fcfs", "priority")
GRAPHS = ("before", "background", "off")
"""When decode graphs are captured on a GPU: before the core is ready, between its steps, or never."""
MATMUL_PRECISIONS = ("highest", "medium")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16")
"""auto: float32, or bfloat16 where products of a CPU are; on a GPU, of activations."""
ATTENTION_BACKENDS = ("triton", "flashinfer")
"""What attends on a GPU."""
_NOT_NEGATIVE = (
    "kv_cache_bytes", "max_model_len", "max_num_active_seqs", "long_prefill_threshold", "num_threads",
    "spawned_at_ns", "parent_pid",
)  # fmt: skip


def check_block_size(block_size: int) -> None:
    """Raises RequestError: kernels read keys in vectors of 16 positions."""
    if block_size < 1 or block_size % 16:
        raise RequestError(f"block_size is {block_size}; it must be a multiple of 16")


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """Settings of one engine core. Raises RequestError on impossible ones."""

    runtime_dir: str = _help("folder of the daemon's sockets", "")
    checkpoint: str = _help("path of the checkpoint whose generation to attach to", "")
    generation_id: str = _help("id of the generation to attach to, instead of a path", "")
    model: str = _help("recipe: model family, or auto", "auto")
    quantization: str = _help("recipe: resident form of the weights", "keep")
    compute_dtype: str = _help("recipe: dtype of activations", "float32")
    config_overrides: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "recipe: keys of the model configuration to replace"}
    )
    device: str = _help("where the weights are: host, or a GPU; empty = wherever the generation is resident", "")
    graphs: str = _help(
        "on a GPU, when decode steps are captured as graphs: before the core is ready, in the background, or off",
        "background",
    )
    matmul_precision: str = _help(
        "on a CPU, of products of more than a few tokens: highest (exact beside float32), or medium (bfloat16)",
        "highest",
    )
    kv_cache_dtype: str = _help(
        "dtype of keys and values: float32, bfloat16 (on a CPU: with AVX-512 BF16 or AMX), or auto (as "
        "matmul_precision and compute_dtype say)",
        "auto",
    )
    attention_backend: str = _help(
        "on a GPU, what attends in steps that no graph replays: triton (our own kernels), or flashinfer (an extra "
        "package; bfloat16 or float16)",
        "triton",
    )
    socket_path: str = _help("Unix socket to serve on", "")
    max_num_seqs: int = _help("requests that run at once", 64)
    token_budget: int = _help("tokens computed in one step, prefill and decode together", 512)
    block_size: int = _help("tokens per KV block, a multiple of 16", 16)
    kv_cache_bytes: int = _help("memory of the KV cache; 0 = as memory_utilization says", 0)
    memory_utilization: float = _help(
        "share of the machine's or container's memory that weights, core and KV cache may take together; "
        "0 = the KV cache takes a tenth of what is available",
        0.0,
    )
    max_model_len: int = _help(
        f"longest sequence, prompt and output; 0 = the model's, at most {DEFAULT_MAX_MODEL_LEN}", 0
    )
    prefix_caching: bool = _help("share keys and values among requests that begin alike", True)
    scheduling_policy: str = _help("who runs first: fcfs, or priority (of requests, then arrival)", "fcfs")
    max_num_active_seqs: int = _help("of max_num_seqs, those that may run at present; 0 = all", 0)
    long_prefill_threshold: int = _help("tokens of one prompt in a step beside other requests; 0 = no limit", 0)
    num_threads: int = _help("threads of tensor operations; 0 = the CPUs this process may use", 0)
    attach_timeout_s: float = _help("seconds the daemon may take to answer, re-hashing of files included", 600.0)
    spawned_at_ns: int = _help("CLOCK_MONOTONIC when the parent spawned this process; 0 = not known", 0)
    standby: bool = _help("hold no KV memory and serve nothing until promoted", False)
    speculate: str = _help(options.HELP["speculate"], "none")
    num_draft_tokens: int = _help(options.HELP["num_draft_tokens"], 0)
    verification: str = _help(options.HELP["verification"], "coupled")
    draft_checkpoint: str = _help("path of the draft model's checkpoint", "")
    draft_generation_id: str = _help("id of the draft model's generation, instead of a path", "")
    draft_quantization: str = _help(options.HELP["draft_quantization"], "keep")
    logits_processors: tuple[str, ...] = _help("custom logits processors, each as package.module:Class", ())
    parent_pid: int = _help("process whose death ends this one; 0 = whichever started it", 0)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "token_budget"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be at least 1")
        check_block_size(self.block_size)
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise RequestError(f"{name} is {getattr(self, name)}; it must not be negative")
        has_draft_model = bool(self.draft_checkpoint or self.draft_generation_id)
        options.check(self.speculate, self.num_draft_tokens, self.verification, has_draft_model)
        if self.graphs not in GRAPHS:
            raise RequestError(f"graphs is {self.graphs!r}; it must be one of {', '.join(GRAPHS)}")
        if self.matmul_precision not in MATMUL_PRECISIONS:
            known = " or ".join(MATMUL_PRECISIONS)
            raise RequestError(f"matmul_precision is {self.matmul_precision!r}; it must be {known}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise RequestError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be one of {known}")
        if self.attention_backend not in ATTENTION_BACKENDS:
            known = " or ".join(ATTENTION_BACKENDS)
            raise RequestError(f"attention_backend is {self.attention_backend!r}; it must be {known}")
        if not 0 <= self.memory_utilization <= 1:
            raise RequestError(f"memory_utilization is {self.memory_utilization}; it must be between 0 and 1")
        if self.scheduling_policy not in POLICIES:
            known = " or ".join(POLICIES)
            raise RequestError(f"scheduling_policy is {self.scheduling_policy!r}; it must be {known}")
        if self.token_budget < self.max_num_seqs:
            raise RequestError(
                f"token_budget {self.token_budget} is less than max_num_seqs {self.max_num_seqs}: "
                "every running request needs one token of a step; raise the one or lower the other"
            )

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            model=self.model,
            quantization=self.quantization,
            compute_dtype=self.compute_dtype,
            config_overrides=self.config_overrides,
        )

    @property
    def draft_recipe(self) -> Recipe:
        return Recipe(quantization=self.draft_quantization, compute_dtype=self.compute_dtype)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> CoreConfig:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise RequestError(f"the core's configuration is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise RequestError(f"the core's configuration is a {type(value).__name__}, not an object")
        unknown = sorted(set(value) - {f.name for f in fields(CoreConfig)})
        if unknown:
            raise RequestError(f"unknown settings of the core: {', '.join(unknown)}")
        if "logits_processors" in value:
            value["logits_processors"] = tuple(value["logits_processors"])
        return CoreConfig(**value)
