"""The daemon's side of an update: loading the next weights and letting go of the last. Blocking calls, in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from preload.engine.client import Control
from preload.engine.client.control import make_selector
from preload.engine.cuda.devices import HOST
from preload.engine.errors import InternalDaemonError, NotResidentError
from preload.protos import weight_cache_pb2 as pb

from .config import FrontendConfig

_LEASES_END_S = 5.0
_POLL_S = 0.05

OnProgress = Callable[[str, int, int], None]
"""(phase, done bytes, total bytes)"""


@dataclass(frozen=True)
class Loaded:
    """`was_resident`: somebody had loaded it before, and may want to keep it."""

    generation_id: str
    resident_bytes: int
    was_resident: bool


async def load(config: FrontendConfig, on_progress: OnProgress) -> Loaded:
    """Makes the configured checkpoint resident. Raises PreloadError, with the daemon's numbers if it does not fit."""
    loop = asyncio.get_running_loop()

    def report(phase: str, done_bytes: int, total_bytes: int) -> None:
        loop.call_soon_threadsafe(on_progress, phase, done_bytes, total_bytes)

    return await asyncio.to_thread(_load, config, report)


def _load(config: FrontendConfig, report: OnProgress) -> Loaded:
    with Control(config.runtime_dir or None) as control:
        ready = {g.id for g in control.list().generations if g.state == pb.GENERATION_STATE_READY}
        for event in control.load(config.checkpoint, config.recipe(), device=config.device or HOST):
            if event.WhichOneof("event") == "loaded":
                loaded = event.loaded
                return Loaded(loaded.id, loaded.resident_bytes, loaded.id in ready)
            if event.WhichOneof("event") == "progress":
                report(event.progress.phase, event.progress.done_bytes, event.progress.total_bytes)
    raise InternalDaemonError(f"the load of {config.checkpoint} ended without a generation")


async def let_go(runtime_dir: str, generation_id: str) -> str:
    """Evicts a generation that nobody uses any more; says what came of it. Raises PreloadError."""
    return await asyncio.to_thread(_let_go, runtime_dir, generation_id)


def _let_go(runtime_dir: str, generation_id: str) -> str:
    selector = make_selector(generation_id=generation_id)
    deadline = time.monotonic() + _LEASES_END_S
    with Control(runtime_dir or None) as control:
        try:
            # The leases of our own cores end with their processes, a moment after those.
            while leases := control.describe(selector).generation.leases:
                if time.monotonic() > deadline:
                    return f"generation {generation_id[:12]} is kept: {len(leases)} others use it"
                time.sleep(_POLL_S)
            control.evict(selector)
        except NotResidentError:
            return f"generation {generation_id[:12]} is gone already"
    return f"generation {generation_id[:12]} is freed"
