"""Conversion between the domain and the messages of the contract. Nothing else builds or reads a message field
by field."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from preload.protos import catalog_pb2 as catalog
from preload.protos import loader_pb2 as loader
from preload.protos import weight_cache_pb2 as pb

from .devices import HOST, checked_name
from .errors import BY_REASON, BadRequestError, CacheError, InternalError, TooManyError
from .generations import Generation, Manifest, Phase, Progress, Rank, Receipt, Recipe, Source, State, generation_id
from .leases import Event, Lease
from .segments import Segment
from .segments.cuda_ipc import CudaIpcSegment

_ROLES = ("target", "draft")
_MAX_CLIENT_CHARS = 200
_MAX_PATH_BYTES = 4096
_MAX_OVERRIDES_BYTES = 32 * 1024
_MAX_NAME_BYTES = 100
_MAX_PHASES = 100
"""A request may have a mebibyte; what the daemon keeps of it, and passes to loaders in one packet, has less."""


def recipe(message: pb.Recipe) -> Recipe:
    """Raises BadRequestError on one that is too large to be meant."""
    _require_size("config_overrides", message.config_overrides, _MAX_OVERRIDES_BYTES)
    for key in ("model", "quantization", "compute_dtype"):
        _require_size(key, getattr(message, key), _MAX_NAME_BYTES)
    return Recipe(
        model=message.model or "auto",
        quantization=message.quantization or "keep",
        compute_dtype=message.compute_dtype or "float32",
        config_overrides=message.config_overrides,
        layout_version=message.layout_version,
    )


def rank(message: pb.Rank) -> Rank:
    """Raises BadRequestError unless every rank lies below its size and the role is known."""
    role = message.role or "target"
    if role not in _ROLES:
        raise BadRequestError(f"unknown role {role!r}; known are {', '.join(_ROLES)}")
    pairs = {}
    for kind in ("tp", "pp", "ep", "dp"):
        own, size = getattr(message, f"{kind}_rank"), getattr(message, f"{kind}_size") or 1
        if own >= size:
            raise BadRequestError(f"{kind}_rank {own} is not below {kind}_size {size}")
        pairs[kind] = (own, size)
    return Rank(**pairs, role=role)


def source(path: str, recipe_message: pb.Recipe, rank_message: pb.Rank, device: str) -> Source:
    """Raises BadRequestError on a path that is not absolute, or too long for the system, and on a device's name that
    is none. An empty device is the host."""
    _require_size("checkpoint path", path, _MAX_PATH_BYTES)
    if not os.path.isabs(path) or "\0" in path:
        raise BadRequestError(f"checkpoint path {path!r} is not absolute", {"path": path})
    if ".." in path.split("/"):  # with symbolic links in it, its meaning cannot be told from its text
        raise BadRequestError(f"checkpoint path {path!r} has '..' in it; resolve it first", {"path": path})
    where = checked_name(device or HOST)
    return Source(os.path.normpath(path), recipe(recipe_message), rank(rank_message), where)


def _require_size(what: str, text: str, limit_bytes: int) -> None:
    size = len(text.encode())
    if size > limit_bytes:
        raise BadRequestError(f"{what} has {size:,} bytes; at most {limit_bytes:,} are allowed")


def client_name(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_CLIENT_CHARS])


def phases(messages: Sequence[pb.Phase]) -> list[Phase]:
    """The first ones of a report, which is only shown and never needed: a holder cannot fill our memory with it."""
    return [Phase(m.name[:_MAX_NAME_BYTES], m.start_ns, m.end_ns) for m in messages[:_MAX_PHASES]]


def error_info(error: CacheError) -> pb.ErrorInfo:
    return pb.ErrorInfo(reason=pb.ErrorReason.Value(error.reason), message=error.message, fields=error.fields)


def error(info: pb.ErrorInfo) -> CacheError:
    """The domain error a loader reported."""
    cls = BY_REASON.get(pb.ErrorReason.Name(info.reason), InternalError)
    return cls(info.message, dict(info.fields))


def receipts(serialized: bytes) -> list[Receipt]:
    return [receipt(message) for message in loader.Receipts.FromString(serialized).receipts]


def receipt(message: pb.Receipt) -> Receipt:
    return Receipt(
        path=message.path,
        device=message.device,
        inode=message.inode,
        size_bytes=message.size_bytes,
        mtime_ns=message.mtime_ns,
        ctime_ns=message.ctime_ns,
        content_digest=message.content_digest,
        stat_blind=message.stat_blind,
    )


def receipt_message(value: Receipt) -> pb.Receipt:
    return pb.Receipt(
        path=value.path,
        device=value.device,
        inode=value.inode,
        size_bytes=value.size_bytes,
        mtime_ns=value.mtime_ns,
        ctime_ns=value.ctime_ns,
        content_digest=value.content_digest,
        stat_blind=value.stat_blind,
    )


def manifest(serialized: bytes, segment_bytes: Sequence[int]) -> Manifest:
    """Checks a loader's manifest against the segments it was given.

    Raises InternalError if a tensor lies outside them: the loader is wrong, not the checkpoint."""
    try:
        message = pb.Manifest.FromString(serialized)
    except DecodeError as cause:
        raise InternalError(f"the loader's manifest is not readable: {cause}") from cause
    if list(message.segment_bytes) != list(segment_bytes):
        raise InternalError("the loader's manifest speaks of other segments than it was given")
    for tensor in message.tensors:
        if tensor.segment >= len(segment_bytes) and tensor.num_bytes:
            raise InternalError(f"manifest: tensor {tensor.name} lies in segment {tensor.segment}")
        if tensor.num_bytes and tensor.offset + tensor.num_bytes > segment_bytes[tensor.segment]:
            raise InternalError(f"manifest: tensor {tensor.name} passes the end of its segment")
    return Manifest(
        serialized,
        message.checkpoint_digest,
        message.resolved_recipe,
        tuple(segment_bytes),
        len(message.tensors),
        message.outline,
    )


def job(mode: loader.Mode.ValueType, of: Source, num_threads: int) -> loader.Job:
    return loader.Job(
        mode=mode,
        checkpoint_path=of.path,
        recipe=recipe_message(of.recipe),
        rank=rank_message(of.rank),
        spawned_at_ns=time.monotonic_ns(),
        num_threads=num_threads,
        device=of.device,
    )


def recipe_message(value: Recipe) -> pb.Recipe:
    return pb.Recipe(
        model=value.model,
        quantization=value.quantization,
        compute_dtype=value.compute_dtype,
        config_overrides=value.config_overrides,
        layout_version=value.layout_version,
    )


def rank_message(value: Rank) -> pb.Rank:
    message = pb.Rank(role=value.role)
    for kind in ("tp", "pp", "ep", "dp"):
        own, size = getattr(value, kind)
        setattr(message, f"{kind}_rank", own)
        setattr(message, f"{kind}_size", size)
    return message


def progress(message: pb.Progress) -> Progress:
    return Progress(message.phase, message.done_bytes, message.total_bytes)


def progress_message(value: Progress) -> pb.Progress:
    return pb.Progress(phase=value.phase, done_bytes=value.done_bytes, total_bytes=value.total_bytes)


def phase_messages(values: Sequence[Phase]) -> list[pb.Phase]:
    return [pb.Phase(name=p.name, start_ns=p.start_ns, end_ns=p.end_ns) for p in values]


def segment_messages(generation: Generation) -> list[pb.Segment]:
    return [
        pb.Segment(index=i, size_bytes=s.size_bytes, backend=s.backend, device=generation.device, handle=s.handle)
        for i, s in enumerate(generation.segments)
    ]


def generation_message(value: Generation, sources: Sequence[Source], leases: Sequence[Lease]) -> pb.Generation:
    now = time.monotonic()
    return pb.Generation(
        id=value.id,
        serial=value.serial,
        state=pb.GenerationState.Value(f"GENERATION_STATE_{value.state.name}"),
        failure=error_info(value.failure) if value.failure else None,
        checkpoint_paths=sorted({s.path for s in sources}),
        checkpoint_digest=value.manifest.checkpoint_digest if value.manifest else "",
        resolved_recipe=value.manifest.resolved_recipe if value.manifest else "",
        recipe=recipe_message(value.recipe),
        rank=rank_message(value.rank),
        device=value.device,
        resident_bytes=value.resident_bytes,
        num_segments=len(value.segments),
        backend=value.segments[0].backend if value.segments else "",
        num_tensors=value.manifest.num_tensors if value.manifest else 0,
        progress=progress_message(value.progress) if value.state is State.LOADING else None,
        load_phases=phase_messages(value.load_phases),
        num_attaches=value.num_attaches,
        age_ms=int((now - value.since_s) * 1000),
        leases=[
            pb.Lease(
                id=lease.id,
                pid=lease.pid,
                client=lease.client,
                age_ms=int((now - lease.since_s) * 1000),
                mapped=lease.mapped,
                unclaimed=lease.unclaimed,
                phases=phase_messages(lease.phases),
            )
            for lease in leases
        ],
    )


def parked_generation(
    value: Generation, bindings: Sequence[tuple[Source, Sequence[Receipt]]], leases: Sequence[Lease]
) -> catalog.ParkedGeneration:
    return catalog.ParkedGeneration(
        key=value.key,
        id=value.id,
        retiring=value.state is State.RETIRING,
        recipe=recipe_message(value.recipe),
        rank=rank_message(value.rank),
        device=value.device,
        segment_bytes=[segment.size_bytes for segment in value.segments],
        **_parked_handles(value.segments),
        load_phases=phase_messages(value.load_phases),
        num_attaches=value.num_attaches,
        sources=[
            catalog.ParkedSource(
                path=of.path,
                recipe=recipe_message(of.recipe),
                rank=rank_message(of.rank),
                receipts=[receipt_message(value) for value in proof],
            )
            for of, proof in bindings
        ],
        leases=[
            catalog.ParkedLease(
                id=lease.id,
                secret=lease.secret,
                pid=lease.pid,
                client=lease.client,
                mapped=lease.mapped,
                phases=phase_messages(lease.phases),
                uid=lease.uid,
            )
            for lease in leases
        ],
    )


def _parked_handles(segments: Sequence[Segment]) -> dict[str, Any]:
    """What the next life needs beside descriptors, or in place of them."""
    blocks = [segment for segment in segments if isinstance(segment, CudaIpcSegment)]
    if blocks:
        return {"holder_id": blocks[0].holder_id, "blocks": [block.block_id for block in blocks]}
    return {"handles": [segment.handle for segment in segments] if any(s.handle for s in segments) else []}


def revived_generation(message: catalog.ParkedGeneration, serialized: bytes, segments: list[Segment]) -> Generation:
    """Raises InternalError if the manifest and the segments do not belong together."""
    found = manifest(serialized, [segment.size_bytes for segment in segments])
    if generation_id(found.checkpoint_digest, found.resolved_recipe) != message.id:
        raise InternalError("the parked manifest is another generation's")
    return Generation(
        serial=0,
        recipe=recipe(message.recipe),
        rank=rank(message.rank),
        device=message.device,
        state=State.RETIRING if message.retiring else State.READY,
        id=message.id,
        manifest=found,
        segments=segments,
        load_phases=phases(message.load_phases),
        num_attaches=message.num_attaches,
        key=message.key,
    )


def revived_source(message: catalog.ParkedSource, device: str) -> tuple[Source, list[Receipt]]:
    return source(message.path, message.recipe, message.rank, device), [receipt(r) for r in message.receipts]


def revived_lease(message: catalog.ParkedLease, generation: Generation) -> Lease:
    return Lease(
        id=message.id,
        generation=generation,
        pid=message.pid,
        client=message.client,
        since_s=time.monotonic(),
        mapped=message.mapped,
        uid=message.uid if message.HasField("uid") else None,
        secret=message.secret,
        unclaimed=True,
        phases=phases(message.phases),
    )


def event_message(event: Event, successor: str) -> pb.AttachEvent:
    """Raises TooManyError in place of a message that a lease is ended: its stream ends with it."""
    match event:
        case Event.RETIRING:
            return pb.AttachEvent(retiring=pb.Retiring())
        case Event.SUPERSEDED:
            return pb.AttachEvent(superseded=pb.Superseded(generation_id=successor))
        case Event.DRAINING:
            return pb.AttachEvent(draining=pb.Draining())
        case Event.FAILED:
            info = pb.ErrorInfo(reason=pb.NO_DEVICE, message=successor)
            return pb.AttachEvent(failed=pb.Failed(error=info))
        case Event.ENDED:
            raise TooManyError(f"this lease was ended: {successor}")
