"""How much memory there is for the KV cache, and how many blocks that makes.

Available memory is the smaller of the host's (MemAvailable) and of the control group's limit less its use, so
that a container's core never plans with memory it cannot have.
"""

from __future__ import annotations

from pathlib import Path

from preload.engine.errors import CoreError
from preload.engine.models.spec import ModelSpec

from .config import DEFAULT_MAX_MODEL_LEN

KV_SHARE = 0.1
"""Part of the available memory that a KV cache takes when it is not told its size."""


def resolve_max_model_len(asked: int, spec: ModelSpec) -> int:
    """The longest sequence, in tokens. 0 asks for the model's own, at most DEFAULT_MAX_MODEL_LEN.

    Raises CoreError if more is asked for than the model was made for; dynamic rope scaling has no such end.
    """
    if not asked:
        return min(spec.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    if asked > spec.max_position_embeddings and spec.rope.scaling != "dynamic":
        raise CoreError(
            f"max_model_len {asked} is more than the model's {spec.max_position_embeddings} positions; lower it, "
            "or load the checkpoint with a rope scaling that extends them"
        )
    return asked


def num_kv_blocks(
    *, kv_cache_bytes: int, block_bytes: int, block_size: int, max_model_len: int, max_num_seqs: int
) -> int:
    """Blocks of the KV cache, the null block included.

    kv_cache_bytes > 0 is taken as said. 0 means KV_SHARE of the available memory, at most what max_num_seqs
    sequences of full length need, at least what one needs. Raises CoreError with the numbers if one sequence of
    max_model_len does not fit.
    """
    per_sequence = -(-max_model_len // block_size)
    needed_bytes = (per_sequence + 1) * block_bytes
    if kv_cache_bytes:
        if kv_cache_bytes < needed_bytes:
            raise CoreError(
                f"the KV cache of {kv_cache_bytes} bytes cannot hold one sequence of max_model_len "
                f"{max_model_len} tokens, which needs {needed_bytes}; raise kv_cache_bytes or lower max_model_len"
            )
        return kv_cache_bytes // block_bytes
    available = available_bytes()
    if needed_bytes > available:
        raise CoreError(
            f"one sequence of max_model_len {max_model_len} tokens needs a KV cache of {needed_bytes} bytes, and "
            f"{available} bytes of memory are available; lower max_model_len or free memory"
        )
    wanted = max(int(available * KV_SHARE), needed_bytes) // block_bytes
    return min(wanted, max_num_seqs * per_sequence + 1)


def available_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process can still take without swapping, as far as host and control groups tell."""
    limits = [_mem_available(proc / "meminfo")]
    group = _own_cgroup(proc / "self" / "cgroup")
    for folder in _ancestors(cgroup_root, group):
        limit = _read_int(folder / "memory.max")
        if limit is not None:
            used = _read_int(folder / "memory.current") or 0
            limits.append(max(0, limit - used + _reclaimable(folder / "memory.stat")))
    return min(limits)


def _mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CoreError(f"{path} has no MemAvailable line")


def _own_cgroup(path: Path) -> str:
    """The version-2 group of this process, "/" if there is none."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("0::"):
                return line[3:]
    return "/"


def _ancestors(root: Path, group: str) -> list[Path]:
    """The group's folder and those above it, up to the root; a limit of each counts."""
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
