"""`FrontendConfig`: everything the frontend process can be told, each option declared once with its help text.

Owns validation of the options among themselves; whether the checkpoint exists or the port is free is found out by
whoever uses them. The command line derives its options from the fields' metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from preload.engine.core.config import (
    ATTENTION_BACKENDS,
    GRAPHS,
    KV_CACHE_DTYPES,
    MATMUL_PRECISIONS,
    POLICIES,
    check_block_size,
)
from preload.engine.core.speculation import options
from preload.engine.errors import RequestError
from preload.engine.recipe import COMPUTE_DTYPES, QUANTIZATIONS, Recipe, parse_overrides

MAX_SEQUENCES_PER_REQUEST = 128
"""Prompts times `n` of one HTTP request."""


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Options of `preload serve`. Raises RequestError on an impossible combination."""

    checkpoint: str = field(
        default="",
        metadata={"help": "checkpoint to serve: a GGUF file or a folder of safetensors", "positional": True},
    )
    generation: str = field(
        default="",
        metadata={"help": "id of a resident generation to serve; the checkpoint need not be there (see --tokenizer)"},
    )
    runtime_dir: str = field(
        default="", metadata={"help": "folder of the daemon's sockets (empty: the user's default)"}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=8000, metadata={"help": "port to listen on (0: any free one, printed)"})
    served_model_name: str = field(
        default="", metadata={"help": "name of the model in the API (empty: the checkpoint's file name)"}
    )

    model: str = field(
        default="auto", metadata={"help": "model family, such as llama (auto: from the configuration)"}
    )
    quantization: str = field(
        default="keep", metadata={"help": f"resident form of the weights: {', '.join(QUANTIZATIONS)}"}
    )
    compute_dtype: str = field(
        default="float32", metadata={"help": "dtype of activations", "choices": COMPUTE_DTYPES}
    )
    config_overrides: str = field(
        default="", metadata={"help": "JSON object that replaces keys of the model's configuration"}
    )
    device: str = field(
        default="",
        metadata={
            "help": "where the weights are, or are to be: host, cuda:<index> as this process sees it, or a GPU's "
            "UUID (empty: host for a checkpoint, wherever it is resident for a generation)"
        },
    )
    graphs: str = field(
        default="background",
        metadata={"help": "on a GPU, when decode steps are captured as graphs", "choices": GRAPHS},
    )
    matmul_precision: str = field(
        default="highest",
        metadata={
            "help": "on a CPU, of products of more than a few tokens: highest (exact beside float32), or medium "
            "(bfloat16: prompts and large batches are faster)",
            "choices": MATMUL_PRECISIONS,
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of keys and values: float32, bfloat16 (half the memory; a CPU needs AVX-512 BF16 or AMX "
            "for it), or auto (on a CPU bfloat16 if --matmul-precision is medium, else as --compute-dtype)",
            "choices": KV_CACHE_DTYPES,
        },
    )
    attention_backend: str = field(
        default="triton",
        metadata={
            "help": "on a GPU, what attends in steps without a graph: triton, or flashinfer (an extra package)",
            "choices": ATTENTION_BACKENDS,
        },
    )

    max_num_seqs: int = field(default=64, metadata={"help": "sequences the core decodes at once"})
    token_budget: int = field(default=512, metadata={"help": "tokens per step, prefill and decode together"})
    block_size: int = field(default=16, metadata={"help": "tokens per KV block, a multiple of 16"})
    kv_cache_bytes: int = field(default=0, metadata={"help": "bytes for the KV cache (0: by memory_utilization)"})
    memory_utilization: float = field(
        default=0.0,
        metadata={
            "help": "share of the machine's or container's memory that weights, core and KV cache may take together "
            "(0: the KV cache takes a tenth of what is available)"
        },
    )
    prefix_caching: bool = field(
        default=True, metadata={"help": "share keys and values among requests that begin alike"}
    )
    scheduling_policy: str = field(
        default="fcfs",
        metadata={"help": "who runs first; priority minds that of requests, lower first", "choices": POLICIES},
    )
    max_num_active_seqs: int = field(
        default=0, metadata={"help": "of max_num_seqs, those that may run at present (0: all)"}
    )
    long_prefill_threshold: int = field(
        default=0, metadata={"help": "tokens of one prompt in a step beside other requests (0: no limit)"}
    )
    max_model_len: int = field(
        default=0, metadata={"help": "longest prompt and answer together, in tokens (0: the model's)"}
    )
    num_threads: int = field(default=0, metadata={"help": "threads of the core (0: one per CPU)"})

    speculate: str = field(default="none", metadata={"help": options.HELP["speculate"], "choices": options.METHODS})
    num_draft_tokens: int = field(default=0, metadata={"help": options.HELP["num_draft_tokens"]})
    verification: str = field(
        default="coupled", metadata={"help": options.HELP["verification"], "choices": options.VERIFICATIONS}
    )
    draft_model: str = field(default="", metadata={"help": "checkpoint of the draft model"})
    draft_generation: str = field(
        default="", metadata={"help": "id of the draft model's resident generation, instead of its checkpoint"}
    )
    draft_quantization: str = field(default="keep", metadata={"help": options.HELP["draft_quantization"]})

    logits_processors: tuple[str, ...] = field(
        default=(),
        metadata={"help": "custom logits processor, as package.module:Class; may be given again", "repeatable": True},
    )

    tokenizer: str = field(
        default="",
        metadata={"help": "tokenizer.json, a folder with one, or a GGUF file (empty: the checkpoint's own)"},
    )
    chat_template: str = field(
        default="", metadata={"help": "file with a jinja chat template (empty: the checkpoint's own)"}
    )
    api_key_file: str = field(
        default="", metadata={"help": "file of API keys, one a line, not readable by others (empty: no keys)"}
    )

    max_body_bytes: int = field(default=4 << 20, metadata={"help": "largest request body in bytes"})
    max_prompt_tokens: int = field(default=0, metadata={"help": "longest prompt in tokens (0: the model's length)"})
    max_concurrent_requests: int = field(
        default=256, metadata={"help": "sequences in flight; more wait in the queue"}
    )
    max_queued_requests: int = field(
        default=1024, metadata={"help": "sequences that may wait; more are answered 503"}
    )
    request_timeout_s: float = field(
        default=600.0, metadata={"help": "seconds a request may take, waiting included (0: no limit)"}
    )
    drain_timeout_s: float = field(
        default=30.0, metadata={"help": "seconds that requests in flight may take to finish on SIGTERM"}
    )
    template: bool = field(
        default=True, metadata={"help": "fork cores from the template process, and start one where there is none"}
    )
    standby: int = field(
        default=0,
        metadata={"help": "warm cores, without KV memory, that wait to take over from one that dies"},
    )
    step_timeout_s: float = field(
        default=30.0,
        metadata={"help": "seconds one step of a core may take; one that takes longer is killed and replaced"},
    )
    client_timeout_s: float = field(
        default=30.0,
        metadata={"help": "seconds a client may take to send a request, or leave its answer unread"},
    )
    core_ready_timeout_s: float = field(
        default=300.0, metadata={"help": "seconds a core may take to become ready before it is replaced"}
    )
    access_log: bool = field(default=False, metadata={"help": "log a line per request"})

    def __post_init__(self) -> None:
        self.recipe()
        if not (self.checkpoint or self.generation):
            raise RequestError("name a checkpoint to serve, or a resident generation with --generation")
        positive = ("max_num_seqs", "token_budget", "max_body_bytes", "max_concurrent_requests")
        for name in positive:
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}")
        check_block_size(self.block_size)
        at_least_0 = (
            "kv_cache_bytes", "memory_utilization", "max_model_len", "max_num_active_seqs", "long_prefill_threshold",
            "num_threads", "max_prompt_tokens", "max_queued_requests",
            "request_timeout_s", "drain_timeout_s", "standby",
        )  # fmt: skip
        for name in at_least_0:
            if not getattr(self, name) >= 0:
                raise RequestError(f"{name} must not be negative, and is {getattr(self, name)}")
        for name in ("core_ready_timeout_s", "step_timeout_s", "client_timeout_s"):
            if not getattr(self, name) > 0:
                raise RequestError(f"{name} must be positive, not {getattr(self, name)}")
        has_draft_model = bool(self.draft_model or self.draft_generation)
        options.check(self.speculate, self.num_draft_tokens, self.verification, has_draft_model)
        if not 0 <= self.port <= 65535:
            raise RequestError(f"port must be between 0 and 65535, not {self.port}")

    def recipe(self) -> Recipe:
        """The recipe these options name. Raises RequestError on an impossible one."""
        return Recipe(
            model=self.model,
            quantization=self.quantization,
            compute_dtype=self.compute_dtype,
            config_overrides=parse_overrides(self.config_overrides),
        )

    def draft_recipe(self) -> Recipe:
        """The recipe of the draft model."""
        return Recipe(quantization=self.draft_quantization, compute_dtype=self.compute_dtype)

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        if self.served_model_name:
            return self.served_model_name
        if not self.checkpoint:
            return self.generation[:12]
        path = Path(self.checkpoint)
        return path.stem if path.suffix in (".gguf", ".safetensors") else path.name or str(path)
