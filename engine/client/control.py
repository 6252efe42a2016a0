"""`Control`: the daemon's rpcs besides Attach, for command lines, frontends and operators' scripts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from preload.engine.cuda.devices import resolve_device
from preload.engine.errors import RequestError, from_proto
from preload.engine.places import default_runtime_dir
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb
from preload.protos import weight_cache_pb2_grpc as pb_grpc

from .channel import open_channel, typed_errors, typed_stream, wait_for_daemon

RPC_TIMEOUT_S = 10.0


def make_selector(
    checkpoint: str | Path | None = None,
    *,
    generation_id: str | None = None,
    checkpoint_digest: str | None = None,
    recipe: Recipe | None = None,
    rank: pb.Rank | None = None,
    device: str = "",
) -> pb.Selector:
    """Names a generation by exactly one of its three names, and by its device as `resolve_device` calls it. Raises
    RequestError otherwise."""
    selector = pb.Selector(recipe=(recipe or Recipe()).to_proto(), rank=rank, device=device)
    if sum(name is not None for name in (checkpoint, generation_id, checkpoint_digest)) != 1:
        raise RequestError("name a generation by a checkpoint, a generation id or a checkpoint digest: one of them")
    if checkpoint is not None:
        selector.checkpoint_path = absolute(checkpoint)
    elif generation_id is not None:
        selector.generation_id = generation_id
    elif checkpoint_digest is not None:
        selector.checkpoint_digest = checkpoint_digest
    return selector


def absolute(path: str | Path) -> str:
    """The path from the root; links up to the last ".." are resolved, because "link/.." is not where the link is.

    Raises RequestError on an empty one, which would mean the current folder."""
    if not str(path):
        raise RequestError("an empty path names no checkpoint")
    parts = Path(path).absolute().parts
    if ".." in parts:
        end = len(parts) - parts[::-1].index("..")
        parts = (os.path.realpath(Path(*parts[:end])), *parts[end:])
    return str(Path(*parts))


class Control:
    """One connection to the daemon of a runtime folder. Every method raises PreloadError; none waits for ever.

    `wait_s`: how long a daemon that is being started may take until it listens."""

    def __init__(self, runtime_dir: str | None = None, *, wait_s: float = 0.0) -> None:
        self.runtime_dir = runtime_dir or default_runtime_dir()
        if wait_s > 0:
            wait_for_daemon(self.runtime_dir, wait_s)
        self._channel = open_channel(self.runtime_dir)
        self._stub = pb_grpc.WeightCacheStub(self._channel)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def load(
        self,
        checkpoint: str | Path,
        recipe: Recipe,
        *,
        role: str = "target",
        device: str = "host",
        evict_lru: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[pb.LoadEvent]:
        """Makes a checkpoint resident; yields progress, and the loaded generation last. `device`: "host",
        "cuda:<index>" in this process's view, or a GPU's UUID.

        Leaving the iteration early cancels the load, unless somebody else waits for it too."""
        request = pb.LoadRequest(
            checkpoint_path=absolute(checkpoint),
            recipe=recipe.to_proto(),
            rank=pb.Rank(role=role),
            device=resolve_device(device),
            evict=pb.EVICT_POLICY_LRU if evict_lru else pb.EVICT_POLICY_NONE,
        )
        return typed_stream(self._stub.Load(request, timeout=timeout_s), self.runtime_dir)

    def list(self) -> pb.ListResponse:
        with typed_errors(self.runtime_dir):
            return self._stub.List(pb.ListRequest(), timeout=RPC_TIMEOUT_S)

    def describe(self, selector: pb.Selector) -> pb.DescribeResponse:
        with typed_errors(self.runtime_dir):
            return self._stub.Describe(pb.DescribeRequest(selector=selector), timeout=RPC_TIMEOUT_S)

    def evict(self, selector: pb.Selector) -> pb.EvictResponse:
        with typed_errors(self.runtime_dir):
            return self._stub.Evict(pb.EvictRequest(selector=selector), timeout=RPC_TIMEOUT_S)

    def verify(self, selector: pb.Selector, timeout_s: float | None = None) -> Iterator[pb.VerifyEvent]:
        """Re-hashes what is resident; yields progress, and the result last. Raises CorruptedError."""
        return typed_stream(
            self._stub.Verify(pb.VerifyRequest(selector=selector), timeout=timeout_s), self.runtime_dir
        )

    def check(self, selector: pb.Selector, timeout_s: float = 600.0) -> str:
        """The generation id that an attach would get. Raises what the attach would raise.

        The time allows for files whose receipts no longer hold and that are hashed again."""
        with typed_errors(self.runtime_dir):
            answer = self._stub.Check(pb.CheckRequest(selector=selector), timeout=timeout_s)
        if not answer.ok:
            raise from_proto(answer.failure)
        return answer.generation_id
