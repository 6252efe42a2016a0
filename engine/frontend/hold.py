"""`WeightsHold`: the frontend's own leases on what a deployment serves.

A core's lease ends with the core. When the daemon's operator evicts what is served, or loads something else from the
same path, the generation retires and goes with its last lease: with that of the only core, if it dies, unless the
frontend holds one as well. Nothing is mapped. Deployments that serve the same share one hold.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from preload.engine.client import Lease
from preload.engine.client.control import make_selector
from preload.engine.errors import PreloadError
from preload.engine.places import default_runtime_dir
from preload.protos import weight_cache_pb2 as pb

from .config import FrontendConfig

_ANSWER_S = 10.0
_FIRST_RETRY_S = 0.25
_MAX_RETRY_S = 5.0


class WeightsHold:
    """Made for one user. Each user releases it once, the last one for good."""

    def __init__(self, config: FrontendConfig) -> None:
        self._runtime_dir = config.runtime_dir or default_runtime_dir()
        self._wanted = _wanted(config)
        self._num_users = 1
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._leases: list[Lease] = []
        self._taker: threading.Thread | None = None

    def suits(self, config: FrontendConfig) -> bool:
        """Whether it is what this configuration needs."""
        return self._wanted == _wanted(config)

    def share(self) -> WeightsHold:
        """The same for one user more."""
        assert self._num_users, "a hold that was released cannot be shared"
        self._num_users += 1
        return self

    def start(self) -> None:
        """Takes the leases in a thread of its own, for which nobody waits; nothing happens if that has begun."""
        if self._taker is None and self._wanted:
            self._taker = threading.Thread(target=self._take_all, name="preload-hold", daemon=True)
            self._taker.start()

    async def release(self) -> None:
        """Gives the leases back with the last user."""
        self._num_users -= 1
        if not self._num_users:
            self._released.set()
            await asyncio.to_thread(self._close)

    def _take_all(self) -> None:
        """A daemon that cannot be reached, or does not have it now, is asked until it gives a lease: the cores go on
        meanwhile with what they have."""
        retry_s, told = _FIRST_RETRY_S, ""
        for role, generation in self._wanted.items():
            while not self._released.is_set() and (problem := self._take(role, generation)):
                if problem != told:
                    print(f"preload serve: no lease of our own yet: {problem}", file=sys.stderr, flush=True)
                told = problem
                self._released.wait(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def _take(self, role: str, generation: str) -> str:
        """Why there is no lease; "" if there is."""
        selector = make_selector(generation_id=generation, rank=pb.Rank(role=role))
        opening = pb.AttachOpen(selector=selector, pid=os.getpid(), client="preload serve")
        try:
            lease = Lease(self._runtime_dir, opening, _ANSWER_S)
        except PreloadError as error:
            return error.message
        with self._lock:
            self._leases.append(lease)
        if self._released.is_set():
            self._close()
        return ""

    def _close(self) -> None:
        with self._lock:
            leases, self._leases = self._leases, []
        for lease in leases:
            lease.close()


def _wanted(config: FrontendConfig) -> dict[str, str]:
    """Roles and generation ids. None where a core finds out by a path what it serves."""
    wanted = {"target": config.generation}
    if config.speculate == "draft":
        wanted["draft"] = config.draft_generation
    return {role: generation for role, generation in wanted.items() if generation}
