"""`attach`: from a checkpoint's name to bound tensors, in one round trip and one hand-over.

Nothing is read, copied or converted: segments are mapped read-only and tensors are views. A write through one kills
the writer; the daemon's weights cannot change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from preload.engine.cuda.devices import HOST, resolve_device
from preload.engine.cuda.mapping import CUDA_IPC
from preload.engine.cuda.views import DeviceSegments
from preload.engine.errors import BadTicketError, DaemonUnreachableError
from preload.engine.places import default_runtime_dir
from preload.engine.recipe import Recipe
from preload.engine.timeline import Phase, Timeline, now_ns
from preload.protos import weight_cache_pb2 as pb

from .binding import bind
from .control import make_selector
from .lease import Lease
from .mapping import Mapped, fetch_descriptors, map_by_handles, map_segments, sizes_of


@dataclass(eq=False)
class Attachment:
    """Resident weights mapped into this process, and the lease on them.

    `tensors` is what `attach` was asked for: torch tensors, numpy arrays, memoryviews, or arrays of device memory.
    They stay valid as long as they are referenced, also after `close`, which gives back the lease only. Memory behind
    an IPC handle is its holder's to free: there the lease goes on until nothing refers to a tensor any more."""

    lease: Lease
    manifest: pb.Manifest
    tensors: Mapping[str, Any]
    timings: list[Phase]
    _segments: Mapped

    @property
    def generation_id(self) -> str:
        return self.lease.attached.generation_id

    @property
    def resident_bytes(self) -> int:
        return sum(sizes_of(self._segments))

    @property
    def device(self) -> str:
        """ "host", or the name of the GPU whose memory this is."""
        segments = self.lease.attached.segments
        return segments[0].device if segments else HOST

    @cached_property
    def layouts(self) -> dict[str, str]:
        """Layout tag of every tensor by name."""
        return {tensor.name: tensor.layout for tensor in self.manifest.tensors}

    @cached_property
    def resolved_recipe(self) -> dict[str, Any]:
        """Model family, spec, quantization, compute dtype and layout version, as the loader resolved them."""
        value: dict[str, Any] = json.loads(self.manifest.resolved_recipe)
        return value

    def close(self) -> None:
        if isinstance(self._segments, DeviceSegments) and self._segments.backend == CUDA_IPC:
            self._segments.when_unmapped(self.lease.close)
        else:
            self.lease.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def attach(
    checkpoint: str | Path | None = None,
    *,
    generation_id: str | None = None,
    checkpoint_digest: str | None = None,
    recipe: Recipe | None = None,
    role: str = "",
    device: str = "",
    runtime_dir: str | None = None,
    tensors: str = "torch",
    client: str = "preload client",
    timeout_s: float = 600.0,
) -> Attachment:
    """Maps a resident generation, named by checkpoint and recipe, by content digest and recipe, or by id.

    `role` is "target" (also when empty, but by id, where it then has to be the only one), or "draft" for a model
    that only guesses for another.
    `device` is "host" (also when empty, but by id or digest, where it then has to be resident on one device only),
    "cuda:<index>" in this process's view, or a GPU's UUID.
    `tensors` is "torch", "numpy", "buffers", or, of a GPU's memory, "device": objects with the CUDA array interface.
    Only "torch" imports torch; a GPU's memory needs it with CUDA. `timeout_s` bounds the daemon's answer,
    which is immediate unless files were touched and have to be hashed again.
    Raises PreloadError: see engine/errors.py for which and why."""
    runtime_dir = runtime_dir or default_runtime_dir()
    timeline = Timeline()
    selector = make_selector(
        checkpoint,
        generation_id=generation_id,
        checkpoint_digest=checkpoint_digest,
        recipe=recipe,
        rank=pb.Rank(role=role) if role else None,
        device=resolve_device(device) if device else "",
    )
    try:
        return _attach(runtime_dir, selector, client, timeout_s, tensors, timeline)
    except BadTicketError:
        # Lost between the lease and the hand-over: the daemon was restarted, or hung up on the lease. Once is chance.
        return _attach(runtime_dir, selector, client, timeout_s, tensors, Timeline())


def _attach(
    runtime_dir: str, selector: pb.Selector, client: str, timeout_s: float, tensors: str, timeline: Timeline
) -> Attachment:
    start_ns = now_ns()
    lease = Lease(runtime_dir, pb.AttachOpen(selector=selector, pid=os.getpid(), client=client), timeout_s)
    timeline.add("attach", start_ns)
    try:
        attached = lease.attached
        with timeline.phase("map"):
            segments = _map(runtime_dir, attached, timeout_s)
        with timeline.phase("bind"):
            manifest = pb.Manifest.FromString(attached.manifest)
            bound = bind(manifest, segments, tensors)
    except BaseException:
        lease.close()
        raise
    return Attachment(lease, manifest, bound, timeline.phases, segments)


def _map(runtime_dir: str, attached: pb.Attached, timeout_s: float) -> Mapped:
    """By the handles in the answer if there are no descriptors, or if they cannot be fetched and a fabric goes
    without; otherwise by the hand-over."""
    if attached.segments and attached.segments[0].backend == CUDA_IPC:
        return map_by_handles(attached.segments)
    # By its name in our runtime folder: in another container the folder may have another path.
    handover_socket = str(Path(runtime_dir).absolute() / Path(attached.handover_socket).name)
    try:
        fds = fetch_descriptors(handover_socket, attached.ticket, timeout_s)
    except DaemonUnreachableError:
        if attached.segments and all(segment.handle for segment in attached.segments):
            return map_by_handles(attached.segments)
        raise
    return map_segments(fds, attached.segments)
