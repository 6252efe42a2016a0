"""The KV cache of a core process: how large it is to be, and why.

Owns the order of measuring, deciding and telling; the arithmetic is memory.py's. The largest step is only measured
where its peak decides something (memory_utilization), once for the same weights, settings and code: it takes as long
as a large step does, and a restart must not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from preload.engine.places import own_dir
from preload.engine.template.fingerprint import fingerprint

from .config import CoreConfig
from .core import EngineCore
from .kv_cache import block_bytes
from .memory import given_kv_blocks, num_kv_blocks, remembered_peak

_WARM_UP_TOKENS = 4


class KVSizing:
    """For the core of one process. `weights_bytes`: of all that it has mapped."""

    def __init__(self, config: CoreConfig, generation_id: str, weights_bytes: int) -> None:
        self._config = config
        self._generation_id = generation_id
        self._weights_bytes = weights_bytes

    def prepare(self, core: EngineCore) -> None:
        """What takes long is done before the core is asked for its cache."""
        if self._needs_peak:
            self._peak(core)

    def allocate(self, core: EngineCore) -> None:
        """Gives the core the KV cache it serves with, and tells how it was sized. Raises CoreError."""
        config, decoder = self._config, core.runner.decoder
        extra_bytes = core.speculator.drafter.bytes_per_block if core.speculator else 0
        bytes_per_block = block_bytes(decoder.spec, config.block_size, decoder.cache_dtype) + extra_bytes
        if config.kv_cache_bytes:
            num_blocks = given_kv_blocks(
                config.kv_cache_bytes,
                block_bytes=bytes_per_block,
                block_size=config.block_size,
                max_model_len=core.max_model_len,
            )
            core.allocate_kv(num_blocks)
            return
        peak_bytes = self._peak(core) if self._needs_peak else None
        core.memory = core.placement.profile(self._weights_bytes, peak_bytes)
        num_blocks = num_kv_blocks(
            core.memory,
            config.memory_utilization,
            block_bytes=bytes_per_block,
            block_size=config.block_size,
            max_model_len=core.max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        core.allocate_kv(num_blocks)
        print(f"preload engine core: {core.memory.describe(core.kv_cache_bytes)}", file=sys.stderr, flush=True)

    @property
    def _needs_peak(self) -> bool:
        return bool(self._config.memory_utilization) and not self._config.kv_cache_bytes

    def _peak(self, core: EngineCore) -> int:
        config = self._config
        key: dict[str, str | int] = {
            "code": fingerprint(),
            "generation": self._generation_id,
            "kernels": core.runner.decoder.kernels,
            "threads": torch.get_num_threads(),
            "token_budget": config.token_budget,
            "max_num_seqs": config.max_num_seqs,
            "block_size": config.block_size,
            "max_model_len": core.max_model_len,
        }

        def measure() -> int:
            core.warm_up(_WARM_UP_TOKENS)  # maps the weights, which are no part of the peak
            return core.placement.measure_peak(core.largest_steps)

        return remembered_peak(Path(own_dir(config.runtime_dir)) / "profiles", key, measure)
