"""Places for resident tensors: a few large segments, and the manifest that describes them.

Invariants: tensors never overlap; every offset is a multiple of 64; a segment is a multiple of its memory's
granularity (of the host's: a page), not empty, and at most `max_segment_bytes` unless it holds one tensor that is
larger alone. Pure arithmetic: no file and no memory is touched here.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from preload.engine.errors import RequestError
from preload.protos import weight_cache_pb2 as pb

from .steps import Resolved, Target

ALIGNMENT = 64
MAX_SEGMENT_BYTES = 8 << 30
MAX_SEGMENTS = 128
MAX_TOTAL_BYTES = 1 << 60
MANIFEST_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a resident tensor's bytes go."""

    segment: int
    offset: int


@dataclass(frozen=True)
class Plan:
    segment_bytes: list[int]
    places: dict[str, Place]


def make_plan(
    targets: Iterable[Target], max_segment_bytes: int = MAX_SEGMENT_BYTES, granularity_bytes: int = mmap.PAGESIZE
) -> Plan:
    """Packs the targets in their order. Raises RequestError for more than any machine holds."""
    ends = [0]
    places: dict[str, Place] = {}
    for target in targets:
        offset = _round_up(ends[-1], ALIGNMENT)
        if target.num_bytes > 0 and ends[-1] > 0 and offset + target.num_bytes > max_segment_bytes:
            ends.append(0)
            offset = 0
        places[target.name] = Place(len(ends) - 1, offset)
        ends[-1] = offset + target.num_bytes
        if len(ends) > MAX_SEGMENTS or sum(ends) > MAX_TOTAL_BYTES:
            raise RequestError(
                f"the weights need more than {MAX_SEGMENTS} segments or {MAX_TOTAL_BYTES:,} bytes; check the files"
            )
    # A tensor without elements may be placed at its segment's very end: one byte more keeps its offset inside.
    return Plan([_round_up(end + 1, granularity_bytes) for end in ends], places)


def make_manifest(
    resolved: Resolved,
    plan: Plan,
    rank: pb.Rank,
    checkpoint_digest: str,
    digests: Mapping[str, bytes],
    outline: bytes,
) -> pb.Manifest:
    """The shard's table. `digests`: BLAKE3 of the resident bytes by resident name; `outline`: of what is stored."""
    manifest = pb.Manifest(
        format_version=MANIFEST_FORMAT_VERSION,
        checkpoint_digest=checkpoint_digest,
        resolved_recipe=resolved.to_json(),
        rank=rank,
        segment_bytes=plan.segment_bytes,
        outline=outline,
    )
    for step in resolved.steps:
        for target in step.targets:
            manifest.tensors.append(_entry(target, plan.places[target.name], digests[target.name]))
    for target, owner in resolved.aliases:
        entry = _entry(target, plan.places[owner], digests[owner])
        entry.alias_of = owner
        manifest.tensors.append(entry)
    return manifest


def _entry(target: Target, place: Place, digest: bytes) -> pb.Tensor:
    return pb.Tensor(
        name=target.name,
        dtype=target.dtype,
        shape=target.shape,
        segment=place.segment,
        offset=place.offset,
        num_bytes=target.num_bytes,
        digest=digest,
        kind=pb.TENSOR_KIND_BUFFER if target.is_buffer else pb.TENSOR_KIND_PARAMETER,
        layout=target.layout,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
