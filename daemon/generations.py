"""Generations and the catalog of them: what is resident, in which state, and under which names.

Owns the states and their transitions. Does not own memory (segments), accounting (capacity) or leases.
Invariants: an id is set exactly from commit on; READY has segments; FAILED and freed ones have none; no two
generations that are READY share (id, rank, device).
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from blake3 import blake3

from .errors import BadRequestError, CacheError, NotResidentError
from .segments import Segment

MIN_ID_PREFIX = 8


class State(Enum):
    LOADING = "LOADING"
    READY = "READY"
    RETIRING = "RETIRING"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Recipe:
    """What an engine asks for, as it asked; the daemon compares recipes and never interprets them."""

    model: str
    quantization: str
    compute_dtype: str
    config_overrides: str
    layout_version: int


@dataclass(frozen=True)
class Rank:
    """Which part of the model: (rank, size) for each kind of parallelism, and the role."""

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)
    role: str = "target"


@dataclass(frozen=True)
class Receipt:
    """Proof of what was read from one file, or of the names in a folder. Times in nanoseconds. The digest is empty if
    the content was not read."""

    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    content_digest: bytes
    stat_blind: bool = False
    """A stat does not show every write: only the content proves the content."""


@dataclass(frozen=True)
class Phase:
    """A stretch of time of some process, in nanoseconds of CLOCK_MONOTONIC."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Source:
    """A name by which engines ask for weights: path, recipe, rank, and the device they are to be on."""

    path: str
    recipe: Recipe
    rank: Rank
    device: str = "host"


@dataclass
class Progress:
    phase: str = "start"
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Manifest:
    """A shard's table as committed: the bytes to hand out, and what the daemon needs to know of them."""

    serialized: bytes
    checkpoint_digest: str
    resolved_recipe: str
    segment_bytes: tuple[int, ...]
    num_tensors: int
    outline: bytes = b""
    """Of the checkpoint's headers and the recipe; empty if its loader wrote none."""


@dataclass(eq=False)
class Generation:
    """One resident (or failed, or arriving) shard of a generation."""

    serial: int
    recipe: Recipe
    rank: Rank
    device: str
    state: State = State.LOADING
    id: str = ""
    manifest: Manifest | None = None
    segments: list[Segment] = field(default_factory=list)
    failure: CacheError | None = None
    progress: Progress = field(default_factory=Progress)
    load_phases: list[Phase] = field(default_factory=list)
    num_attaches: int = 0
    last_used: int = 0
    lingering_bytes: int = 0
    """Of a FAILED generation that holders still map: no longer ours to free, and not free yet."""
    lingering: list[Segment] = field(default_factory=list)
    """Those of them that we must not let go of before."""
    key: str = field(default_factory=lambda: secrets.token_hex(6))
    since_s: float = field(default_factory=time.monotonic)
    """When it came into its state, in this life of the daemon."""

    @property
    def name(self) -> str:
        """What people call it, and every command takes: the start of its id; or @ and its serial if it has no id yet,
        or is FAILED and may share its id with one that was loaded since."""
        return f"@{self.serial}" if self.state is State.FAILED or not self.id else self.id[:12]

    @property
    def resident_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def commit(self, manifest: Manifest, segments: list[Segment], phases: list[Phase]) -> None:
        """LOADING → READY. The caller has sealed the segments and seen the loader exit."""
        assert self.state is State.LOADING
        self.id = generation_id(manifest.checkpoint_digest, manifest.resolved_recipe)
        self.manifest, self.segments, self.load_phases = manifest, segments, phases
        self.enter(State.READY)

    def fail(self, failure: CacheError, *, is_leased: bool = False) -> int:
        """→ FAILED(reason). Returns the bytes that are ours no longer, or only for the sake of its leases."""
        self.failure = failure
        self.enter(State.FAILED)
        if is_leased:
            self.lingering = [segment for segment in self.segments if segment.dies_with_us]
        return self.free()

    def enter(self, state: State) -> None:
        self.state = state
        self.since_s = time.monotonic()

    def free(self) -> int:
        """Lets go of the segments; processes that map them keep them, if they can. Returns the bytes let go."""
        num_bytes = self.resident_bytes
        for segment in self.segments:
            if segment not in self.lingering:
                segment.close()
        self.segments = []
        return num_bytes

    def end_lingering(self) -> int:
        """Nobody maps a FAILED generation any more. Returns the bytes that are free now."""
        for segment in self.lingering:
            segment.close()
        num_bytes, self.lingering, self.lingering_bytes = self.lingering_bytes, [], 0
        return num_bytes


def generation_id(checkpoint_digest: str, resolved_recipe: str) -> str:
    """Hash of content and recipe, 64 hexadecimal digits."""
    return blake3(f"{checkpoint_digest}\n{resolved_recipe}".encode()).hexdigest()


class Catalog:
    """Every generation the daemon knows, and the receipts that tie sources on disk to them."""

    MAX_FAILED = 16
    MAX_NAMES = 64
    """Sources that one generation is remembered under; the oldest is forgotten, and would be hashed again."""

    def __init__(self) -> None:
        self._serials = itertools.count(1)
        self._clock = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._receipts: dict[Source, tuple[Generation, list[Receipt]]] = {}
        self._attempts: dict[Source, Generation] = {}

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._generations.values()))

    def begin(self, source: Source) -> Generation:
        """A new LOADING generation; an earlier failure of the same source is forgotten."""
        previous = self._attempts.get(source)
        if previous is not None and previous.state is State.FAILED:
            self.remove(previous)
        generation = Generation(next(self._serials), source.recipe, source.rank, source.device)
        self._generations[generation.serial] = generation
        self._attempts[source] = generation
        return generation

    def attempt(self, source: Source) -> Generation | None:
        """The latest load of this source that is LOADING or FAILED, if any."""
        generation = self._attempts.get(source)
        return generation if generation and generation.state in (State.LOADING, State.FAILED) else None

    def twin(self, generation_id: str, rank: Rank, device: str) -> Generation | None:
        """The READY generation with this identity on this device, if any."""
        for generation in self:
            found = (generation.id, generation.rank, generation.device, generation.state)
            if found == (generation_id, rank, device, State.READY):
                return generation
        return None

    def elsewhere(self, source: Source) -> list[str]:
        """Other devices on which the source's content is READY."""
        same = [
            g
            for s, (g, _) in self._receipts.items()
            if (s.path, s.recipe, s.rank) == (source.path, source.recipe, source.rank)
        ]
        return [g.device for g in same if g.state is State.READY and g.device != source.device]

    def bind(self, source: Source, generation: Generation, receipts: list[Receipt]) -> Generation | None:
        """Ties a source to what it was proved to hold. Returns the generation it held before, if another."""
        previous = self._receipts.pop(source, None)
        self._receipts[source] = (generation, receipts)
        for oldest in [s for s, (g, _) in self._receipts.items() if g is generation][: -self.MAX_NAMES]:
            del self._receipts[oldest]
        return previous[0] if previous and previous[0] is not generation else None

    def unbind(self, source: Source, generation: Generation) -> None:
        """Forgets that a source holds a generation, if it is still said to."""
        if self._receipts.get(source, (None,))[0] is generation:
            del self._receipts[source]

    def bound(self, source: Source) -> tuple[Generation, list[Receipt]] | None:
        return self._receipts.get(source)

    def names(self, generation: Generation) -> list[Source]:
        """The sources that were proved to hold this generation, and not another since."""
        return [s for s, (g, _) in self._receipts.items() if g is generation]

    def sources(self, generation: Generation) -> list[Source]:
        """Its names; for one that has none, because it is not READY, what it was loaded from."""
        return self.names(generation) or [s for s, g in self._attempts.items() if g is generation]

    def bindings(self, generation: Generation) -> list[tuple[Source, list[Receipt]]]:
        """The sources that are proved to hold this generation, with the proof."""
        return [(source, receipts) for source, (g, receipts) in self._receipts.items() if g is generation]

    def adopt(self, generation: Generation) -> None:
        """Takes in a generation of an earlier life of the daemon, under a serial of this one."""
        generation.serial = next(self._serials)
        self._generations[generation.serial] = generation
        self.touch(generation)

    def receipts(self, generation: Generation) -> list[Receipt]:
        found = {r.path: r for g, receipts in self._receipts.values() if g is generation for r in receipts}
        return [found[path] for path in sorted(found)]

    def by_id(self, prefix: str, rank: Rank | None = None, device: str = "") -> Generation:
        """Raises BadRequestError on a short or ambiguous prefix, NotResidentError if there is none. Without a rank or
        a device, the generation must have one only. A serial, as in "@7", names exactly one."""
        if prefix.startswith("@"):
            return self._by_serial(prefix)
        if len(prefix) < MIN_ID_PREFIX:
            raise BadRequestError(f"generation id {prefix!r} is shorter than {MIN_ID_PREFIX} digits")
        found = [g for g in self if g.id.startswith(prefix) and rank in (None, g.rank) and device in ("", g.device)]
        live = [g for g in found if g.state is State.READY] or found
        if not live:
            raise NotResidentError(f"no generation with id {prefix}", {"generation": prefix})
        if len({(g.id, g.rank, g.device) for g in live}) > 1:
            which = ", ".join(f"{g.id} ({g.rank.role} on {g.device})" for g in live)
            raise BadRequestError(f"generation id {prefix} is ambiguous: {which}")
        return live[-1]

    def _by_serial(self, name: str) -> Generation:
        digits = name[1:]
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise BadRequestError(f"{name!r} is no name of a generation; a serial is @ and a number")
        found = self._generations.get(int(digits))
        if found is None:
            raise NotResidentError(f"no generation {name} in this life of the daemon", {"generation": name})
        return found

    def by_digest(self, digest: str, recipe: Recipe, rank: Rank, device: str = "") -> Generation:
        """Raises NotResidentError if no generation was made from this content by this recipe, BadRequestError if
        several were: the recipe as asked leaves the configuration to the checkpoint's files."""
        found = [
            g
            for g in self
            if g.manifest
            and g.manifest.checkpoint_digest == digest
            and g.rank == rank
            and device in ("", g.device)
            # Another spelling of the recipe may have led here as well: "auto" and the family's name.
            and recipe in {g.recipe, *(source.recipe for source in self.names(g))}
        ]
        live = [g for g in found if g.state is State.READY] or found
        if not live:
            raise NotResidentError(f"no generation of checkpoint digest {digest} with this recipe")
        if len({g.device for g in live}) > 1:
            raise BadRequestError(
                f"checkpoint digest {digest} is resident on {', '.join(sorted({g.device for g in live}))}; name one"
            )
        if len({g.id for g in live}) > 1:
            raise BadRequestError(
                f"checkpoint digest {digest} with this recipe is ambiguous, since its configuration was read from "
                f"different files: {', '.join(g.id for g in live)}; ask by generation id"
            )
        return live[-1]

    def outlines(self, source: Source) -> frozenset[bytes]:
        """Outlines of the READY generations that could turn out to be this source's content; empty if none could."""
        wanted = source.recipe
        return frozenset(
            g.manifest.outline
            for g in self
            if g.manifest is not None
            and g.state is State.READY
            and (g.rank, g.device) == (source.rank, source.device)
            and (g.recipe.quantization, g.recipe.compute_dtype, g.recipe.layout_version)
            == (wanted.quantization, wanted.compute_dtype, wanted.layout_version)
        )

    def touch(self, generation: Generation) -> None:
        """Marks it as used now, for the order of LRU eviction."""
        generation.last_used = next(self._clock)

    def remove(self, generation: Generation) -> None:
        self._generations.pop(generation.serial, None)
        self._receipts = {s: v for s, v in self._receipts.items() if v[0] is not generation}
        self._attempts = {s: g for s, g in self._attempts.items() if g is not generation}

    def forget_old_failures(self) -> None:
        failed = [g for g in self if g.state is State.FAILED]
        for generation in failed[: -self.MAX_FAILED]:
            self.remove(generation)
