"""Capacity: refusal with the numbers, and eviction of what was used least recently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.errors import NoMemoryError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")
MIB = 1 << 20
SIZE = 2 * MIB - (64 << 10)


@pytest.fixture
def daemon(make_daemon: Callable[..., Any]) -> Any:
    """Room for three generations of almost 2 MiB, whose segments have a page more, or take 2 MiB of a GPU."""
    return make_daemon("--host-limit", "7M")


@pytest.fixture
def checkpoint(tmp_path: Path, write_safetensors: Callable[..., Path]) -> Callable[[str], Path]:
    """Checkpoints of almost 2 MiB that differ."""
    return lambda name: write_safetensors(tmp_path / f"{name}.safetensors", {name: ("U8", [SIZE], bytes(SIZE))})


def load(daemon: Any, path: Path, evict_lru: bool = False) -> Any:
    with daemon.control() as control:
        *_, last = control.load(path, RAW, evict_lru=evict_lru, timeout_s=60)
    return last.loaded


def resident(daemon: Any) -> set[str]:
    return {
        Path(path).stem
        for g in daemon.generations()
        if g.state == pb.GENERATION_STATE_READY
        for path in g.checkpoint_paths
    }


def test_a_load_that_does_not_fit_is_refused_with_the_numbers(daemon: Any, checkpoint: Callable[[str], Path]) -> None:
    sizes = [load(daemon, checkpoint(name)).resident_bytes for name in "abc"]
    with pytest.raises(NoMemoryError) as refusal:
        load(daemon, checkpoint("d"))
    needed = sizes[0]
    numbers = refusal.value.fields
    assert int(numbers["needed_bytes"]) == needed
    assert int(numbers["capacity_bytes"]) == 7 * MIB
    assert int(numbers["resident_bytes"]) == int(numbers["evictable_bytes"]) == sum(sizes)
    assert f"needs {needed:,} bytes" in refusal.value.message
    assert f"limit of {7 * MIB:,} bytes" in refusal.value.message
    assert "--evict lru" in refusal.value.message
    assert resident(daemon) == {"a", "b", "c"}
    assert daemon.device().reserved_bytes == 0
    (failed,) = [g for g in daemon.generations() if g.state == pb.GENERATION_STATE_FAILED]
    assert failed.failure.reason == pb.NO_MEMORY


def test_lru_evicts_what_was_used_least_recently(daemon: Any, checkpoint: Callable[[str], Path]) -> None:
    for name in "abc":
        load(daemon, checkpoint(name))
    load(daemon, checkpoint("d"), evict_lru=True)
    assert resident(daemon) == {"b", "c", "d"}


def test_an_attach_counts_as_a_use(
    daemon: Any, checkpoint: Callable[[str], Path], hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    for name in "abc":
        load(daemon, checkpoint(name))
    hold(daemon, checkpoint("a").with_name("a.safetensors"), recipe={"model": "raw"}).end()
    wait_for(lambda: not any(g.leases for g in daemon.generations()), "the lease to end")
    load(daemon, checkpoint("d"), evict_lru=True)
    assert resident(daemon) == {"a", "c", "d"}


def test_lru_never_evicts_what_is_leased(
    daemon: Any, checkpoint: Callable[[str], Path], hold: Callable[..., Any]
) -> None:
    paths = {name: checkpoint(name) for name in "abcd"}
    for name in "abc":
        load(daemon, paths[name])
    holders = [hold(daemon, paths[name], recipe={"model": "raw"}) for name in "ab"]
    load(daemon, paths["d"], evict_lru=True)
    assert resident(daemon) == {"a", "b", "d"}
    holders.append(hold(daemon, paths["d"], recipe={"model": "raw"}))
    with pytest.raises(NoMemoryError, match="0 could be evicted"):
        load(daemon, paths["c"], evict_lru=True)
    assert resident(daemon) == {"a", "b", "d"}


def test_lru_evicts_nothing_when_that_would_not_be_enough(
    daemon: Any, checkpoint: Callable[[str], Path], sparse_checkpoint: Callable[..., Path]
) -> None:
    for name in "ab":
        load(daemon, checkpoint(name))
    with pytest.raises(NoMemoryError):
        load(daemon, sparse_checkpoint(1, 8 * MIB), evict_lru=True)
    assert resident(daemon) == {"a", "b"}


@pytest.mark.parametrize("is_copy_loaded_first", [False, True])
def test_lru_never_evicts_a_model_of_the_configuration(
    make_daemon: Callable[..., Any], checkpoint: Callable[[str], Path], tmp_path: Path,
    wait_for: Callable[..., Any], is_copy_loaded_first: bool,
) -> None:  # fmt: skip
    """Also if it came in by another name: then its first load finds it resident."""
    paths = {name: checkpoint(name) for name in "abcd"}
    configured = paths["a"]
    if is_copy_loaded_first:
        configured = tmp_path / "copy.safetensors"
    config = tmp_path / "config.toml"
    config.write_text(f"[daemon]\nhost_limit = '7M'\n[[models]]\ncheckpoint = '{configured}'\nmodel = 'raw'\n")
    daemon = make_daemon("--config", str(config))
    load(daemon, paths["a"])
    if is_copy_loaded_first:
        configured.write_bytes(paths["a"].read_bytes())
        load(daemon, configured)
    for name in "bcd":
        load(daemon, paths[name], evict_lru=True)
    assert resident(daemon) >= {"a", "c", "d"}
    assert len(resident(daemon) - {"copy"}) == 3


def test_two_loads_cannot_be_promised_the_same_room(
    make_daemon: Callable[..., Any], gate: Any, checkpoint: Callable[[str], Path], start_load: Callable[..., Any]
) -> None:
    daemon = make_daemon("--host-limit", "3M", command=gate.command())
    gate.stop_at(gate.HEADER)
    first = start_load(daemon, checkpoint("a"), model="raw")
    gate.loader_pid()
    with pytest.raises(NoMemoryError, match="reserved"):
        load(daemon, checkpoint("b"))
    gate.open()
    assert first.join().loaded.state == pb.GENERATION_STATE_READY
