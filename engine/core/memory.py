"""How much memory there is for the KV cache, and how many blocks that makes.

What the machine has is the smaller of the host's memory and of the control groups' limits, so that a container's core
never plans with memory it cannot have. The daemon's weights are mapped, not owned: they count once, as used, whoever
else maps them. What the core itself takes is measured: its private memory, and the peak of a largest step on random
ids (runner.py). A measured peak is kept in the runtime folder for the next core of the same weights and settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from preload.engine.errors import CoreError, RequestError
from preload.engine.models.spec import ModelSpec

from .config import DEFAULT_MAX_MODEL_LEN

KV_SHARE = 0.1
"""Part of the available memory that a KV cache takes unless it is told otherwise: hosts serve several models, and two
cores of each during an update. Blocks that were once used stay, for the sake of later hits."""

_MAX_REMEMBERED = 64


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """What there is, and what is taken by everything but the KV cache."""

    total_bytes: int
    available_bytes: int
    weights_bytes: int
    core_bytes: int
    """Private memory of the core."""
    peak_bytes: int | None = None
    """What a largest step takes beside that, while it runs; None if it was not measured."""

    def kv_cache_bytes(self, utilization: float) -> int:
        """Bytes left for the KV cache: total · utilization less what is taken, at most what is available now. A
        utilization of 0 means KV_SHARE of what is available. Raises CoreError with the numbers if nothing is left."""
        if not utilization:
            return int(self.available_bytes * KV_SHARE)
        peak = self.peak_bytes or 0
        taken = self.weights_bytes + self.core_bytes + peak
        left = int(self.total_bytes * utilization) - taken
        if left <= 0:
            raise CoreError(
                f"memory_utilization {utilization:g} of {self.total_bytes} bytes leaves nothing for the KV cache: "
                f"the weights take {self.weights_bytes}, the core {self.core_bytes} and its largest step {peak}; "
                "raise it"
            )
        return max(0, min(left, self.available_bytes - peak))

    def describe(self, kv_cache_bytes: int) -> str:
        """One line for the log."""
        peak = "" if self.peak_bytes is None else f", its largest step {_mib(self.peak_bytes)}"
        return (
            f"memory: {_mib(self.total_bytes)} in all, {_mib(self.available_bytes)} available; "
            f"weights {_mib(self.weights_bytes)}, core {_mib(self.core_bytes)}{peak}; "
            f"KV cache {_mib(kv_cache_bytes)}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def resolve_max_model_len(asked: int, spec: ModelSpec) -> int:
    """The longest sequence, in tokens. 0 asks for the model's own, at most DEFAULT_MAX_MODEL_LEN.

    Raises CoreError if more is asked for than the model was made for; dynamic rope scaling has no such end.
    """
    if not asked:
        return min(spec.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    if asked > spec.max_position_embeddings and spec.rope.scaling != "dynamic":
        raise RequestError(
            f"max_model_len {asked} is more than the model's {spec.max_position_embeddings} positions; lower it, "
            "or load the checkpoint with a rope scaling that extends them"
        )
    return asked


def given_kv_blocks(kv_cache_bytes: int, *, block_bytes: int, block_size: int, max_model_len: int) -> int:
    """Blocks of a KV cache of a given size, the null block included.

    Raises CoreError with the numbers if one sequence of max_model_len does not fit."""
    needed_bytes = (-(-max_model_len // block_size) + 1) * block_bytes
    if kv_cache_bytes < needed_bytes:
        raise RequestError(
            f"the KV cache of {kv_cache_bytes} bytes cannot hold one sequence of max_model_len "
            f"{max_model_len} tokens, which needs {needed_bytes}; raise kv_cache_bytes or lower max_model_len"
        )
    return kv_cache_bytes // block_bytes


def num_kv_blocks(
    profile: MemoryProfile,
    utilization: float,
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Blocks of the KV cache that the profile has room for, the null block included.

    At most what max_num_seqs sequences of full length need; at least what one needs, as long as memory for that is
    available. Raises CoreError with the numbers if it is not.
    """
    per_sequence = -(-max_model_len // block_size)
    needed_bytes = (per_sequence + 1) * block_bytes
    available = profile.available_bytes - (profile.peak_bytes or 0)
    if needed_bytes > available:
        raise CoreError(
            f"one sequence of max_model_len {max_model_len} tokens needs a KV cache of {needed_bytes} bytes, and "
            f"{available} bytes of memory are available; lower max_model_len or free memory"
        )
    wanted = max(profile.kv_cache_bytes(utilization), needed_bytes) // block_bytes
    return min(wanted, max_num_seqs * per_sequence + 1)


def take_profile(weights_bytes: int, peak_bytes: int | None = None) -> MemoryProfile:
    """The machine and this process as they are now."""
    return MemoryProfile(
        total_bytes=total_bytes(),
        available_bytes=available_bytes(),
        weights_bytes=weights_bytes,
        core_bytes=_own_status("RssAnon"),
        peak_bytes=peak_bytes,
    )


def measure_peak(work: Callable[[], None]) -> int:
    """Bytes that `work` takes at most, beyond what this process has now.

    Memory is counted when it is touched, whoever allocates it. Where the kernel cannot forget an earlier peak the
    result may be too high."""
    before = _own_status("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return max(0, _own_status("VmHWM") - before)


def remembered_peak(folder: Path, key: dict[str, str | int], measure: Callable[[], int]) -> int:
    """The peak that was measured under this key before, or else the one measured now, which is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = folder / f"{digest}.json"
    try:
        kept = json.loads(path.read_bytes())
        if kept["key"] == key and isinstance(kept["peak_bytes"], int):
            return int(kept["peak_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or one that was cut short: it is measured and written again
    peak_bytes = measure()
    _remember(path, {"key": key, "peak_bytes": peak_bytes})
    return peak_bytes


def _remember(path: Path, value: dict[str, object]) -> None:
    """Writes the file at once or not at all. A folder that cannot be written costs the next core a measurement."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = sorted(path.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
        for old in others[: max(0, len(others) - _MAX_REMEMBERED + 1)]:
            old.unlink(missing_ok=True)
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in torch, which says so in a RuntimeError."""
    text = str(error)
    return isinstance(error, MemoryError) or any(
        words in text for words in ("can't allocate memory", "bad_alloc", "CUDA out of memory")
    )


def total_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory of the host, or of the smallest control group around this process."""
    limits = [_meminfo(proc, "MemTotal")]
    for folder in _groups(proc, cgroup_root):
        limit = _read_int(folder / "memory.max")
        if limit is not None:
            limits.append(limit)
    return min(limits)


def available_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process can still take without swapping, as far as host and control groups tell."""
    limits = [_meminfo(proc, "MemAvailable")]
    for folder in _groups(proc, cgroup_root):
        limit = _read_int(folder / "memory.max")
        if limit is not None:
            used = _read_int(folder / "memory.current") or 0
            limits.append(max(0, limit - used + _reclaimable(folder / "memory.stat")))
    return min(limits)


def _meminfo(proc: Path, name: str) -> int:
    return _kilobytes(proc / "meminfo", name)


def _own_status(name: str) -> int:
    return _kilobytes(Path("/proc/self/status"), name)


def _kilobytes(path: Path, name: str) -> int:
    """Bytes, from a line "name: number kB"."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise CoreError(f"{path} has no {name} line")


def _groups(proc: Path, root: Path) -> list[Path]:
    """The folders of this process's version-2 group and of those above it, up to the root; a limit of each counts."""
    group = "/"
    path = proc / "self" / "cgroup"
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("0::"):
                group = line[3:]
    folder = root / group.lstrip("/")
    return [folder, *(p for p in folder.parents if p == root or root in p.parents)]


def _read_int(path: Path) -> int | None:
    """The number in a file; None if there is no such file or it says "max"."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)


def _reclaimable(path: Path) -> int:
    """Inactive file pages: they count as used by the group and are given back on demand."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
