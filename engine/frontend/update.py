"""What an update asks for, and the configuration it makes of the one that is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from preload.engine.errors import RequestError

from .config import FrontendConfig

_RECIPE = ("model", "quantization", "compute_dtype", "config_overrides")
_TEXT = ("tokenizer", "chat_template")
_CORE = (
    "max_num_seqs", "token_budget", "block_size", "kv_cache_bytes", "memory_utilization", "max_model_len",
    "prefix_caching", "scheduling_policy", "max_num_active_seqs", "long_prefill_threshold", "num_threads", "template",
    "standby", "step_timeout_s", "core_ready_timeout_s", "speculate", "num_draft_tokens", "verification",
    "matmul_precision", "kv_cache_dtype",
)  # fmt: skip
SETTABLE = (*_CORE, *_RECIPE, *_TEXT)
"""What an update may change beside the checkpoint. The rest belongs to the frontend, which goes on as it is."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A rolling update. `changes` are values of FrontendConfig as text, `drain_s` of None is the configured time."""

    to: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    evict_first: bool = False
    drain_s: float | None = None

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Update:
        """Raises RequestError on anything unexpected."""
        to, changes, drain_s = value.get("to") or "", value.get("set") or {}, value.get("drain_s")
        if not isinstance(to, str) or not isinstance(changes, dict):
            raise RequestError("'to' is a path, and 'set' an object of strings")
        if not all(isinstance(text, str) for text in changes.values()):
            raise RequestError("the values of 'set' are strings")
        if drain_s is not None and (isinstance(drain_s, bool) or not isinstance(drain_s, int | float) or drain_s < 0):
            raise RequestError("'drain_s' is a number of seconds")
        return Update(to=to, changes=changes, evict_first=value.get("evict_first") is True, drain_s=drain_s)


def updated_config(config: FrontendConfig, update: Update) -> FrontendConfig:
    """The configuration after the update. The service keeps its name. Raises RequestError naming the setting.

    `generation` is empty where it has to be found out by loading."""
    values: dict[str, Any] = {name: _parse(name, text) for name, text in update.changes.items()}
    if update.to:
        values["checkpoint"] = update.to
    if changes_weights(update):
        values["generation"] = ""
        if not (update.to or config.checkpoint):
            raise RequestError("another recipe needs the checkpoint's files: name them with --to")
    return replace(config, served_model_name=config.model_name, **values)


def changes_weights(update: Update) -> bool:
    """Whether a generation has to be found by loading; it may turn out to be the one that is served."""
    return bool(update.to) or any(name in update.changes for name in _RECIPE)


def changes_text(update: Update) -> bool:
    """Whether tokenizer or chat template have to be read again."""
    return bool(update.to) or any(name in update.changes for name in _TEXT)


def _parse(name: str, text: str) -> Any:
    if name not in SETTABLE:
        raise RequestError(f"{name!r} cannot be changed by an update; {', '.join(SETTABLE)} can")
    kind = get_type_hints(FrontendConfig)[name]
    if kind is bool:
        if text not in ("true", "false"):
            raise RequestError(f"{name} is true or false, not {text!r}")
        return text == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise RequestError(f"{name} is a number ({kind.__name__}), not {text!r}") from error
