"""One copy for all: shared pages, no private ones, and nobody who could write."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client.control import make_selector

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()


def is_segment(text: str, of: str, backend: str) -> bool:
    """Whether a link or a mapping is of a checkpoint's segments; all of an emulated GPU's memory is, which has no
    names."""
    return "/memfd:fakecuda:" in text if backend != "host" else "/memfd:preload:" in text and f":{of}" in text


def segment_bytes(pid: int, of: str, backend: str) -> Counter[str]:
    """Sums over a process's mappings of one checkpoint's segments, in bytes by field of smaps."""
    total: Counter[str] = Counter()
    counts = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef":
            counts = is_segment(line, of, backend)
        elif counts and line.endswith(" kB"):
            key, value = line.split(":")
            total[key] += int(value.split()[0]) * 1024
    return total


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def test_the_pages_of_two_holders_are_there_once_and_none_is_private(
    daemon: Any, tmp_path: Path, write_safetensors: Callable[..., Path], hold: Callable[..., Any], tested_backend: str
) -> None:
    path = write_safetensors(
        tmp_path / f"shared-{os.getpid()}.safetensors",
        {f"t{i}": ("U8", [4 * MIB], os.urandom(4 * MIB)) for i in range(8)},
    )
    loaded = daemon.load(path, model="raw")
    holders = [hold(daemon, path, recipe={"model": "raw"}) for _ in range(2)]
    for holder in holders:
        holder.ask("touch")
    shares: Counter[str] = Counter()
    for pid in all_pids() if tested_backend == "host" else [holder.pid for holder in holders]:
        try:
            shares += segment_bytes(pid, path.name, tested_backend)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is none that this user may look into
    assert 1.02 * shares["Pss"] >= 32 * MIB, "every tensor's pages are there"
    assert shares["Pss"] <= 1.02 * loaded.resident_bytes
    assert shares["Private_Dirty"] == shares["Private_Clean"] == shares["Anonymous"] == 0
    assert segment_bytes(daemon.pid, path.name, tested_backend)["Size"] == 0


def test_a_write_through_a_tensor_kills_the_writer_and_changes_nothing(
    daemon: Any, raw_checkpoint: Path, hold: Callable[..., Any], tested_backend: str
) -> None:
    if tested_backend == "cuda_ipc":
        pytest.skip("no driver maps memory behind an IPC handle read-only")
    loaded = daemon.load(raw_checkpoint, model="raw")
    witness = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    digest = witness.ask("digest a")
    writer = hold(daemon, raw_checkpoint, recipe={"model": "raw"}, tensors="torch")
    writer.tell("write a")
    assert writer.process.wait(60) == -signal.SIGSEGV
    assert witness.ask("digest a") == digest
    with daemon.control() as control:
        *_, last = control.verify(make_selector(generation_id=loaded.id), timeout_s=60)
    assert last.verified.num_tensors == 3


def test_private_memory_of_a_holder_does_not_grow_with_the_generation(
    daemon: Any, sparse_checkpoint: Callable[..., Path], hold: Callable[..., Any], tested_backend: str
) -> None:
    private = {}
    for name, size in (("small", 64 * MIB), ("large", 1024 * MIB)):
        path = sparse_checkpoint(16, size // 16, name)
        daemon.load(path, model="raw")
        holder = hold(daemon, path, recipe={"model": "raw"})
        assert holder.opening["resident_bytes"] >= size
        holder.ask("touch")
        assert segment_bytes(holder.pid, path.name, tested_backend)["Rss"] >= size
        private[name] = holder.ask("private")
        holder.end()
    assert abs(private["large"] - private["small"]) < 4 * MIB


def test_an_attachment_outlives_its_lease_and_its_descriptors_are_closed(
    daemon: Any, raw_checkpoint: Path, tested_backend: str
) -> None:
    from preload.engine.client import attach
    from preload.engine.recipe import Recipe

    def descriptors() -> set[str]:
        links = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.add(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue  # the listing's own
        return {link for link in links if is_segment(link, "outlives", tested_backend)}

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(is_segment(line, "outlives", tested_backend) for line in lines)

    checkpoint = raw_checkpoint.rename(raw_checkpoint.with_name("outlives.safetensors"))
    daemon.load(checkpoint, model="raw")
    attachment = attach(checkpoint, recipe=Recipe(model="raw"), runtime_dir=str(daemon.runtime_dir), tensors="numpy")
    tensor = attachment.tensors["a"]
    kept = tensor.tobytes()
    attachment.close()
    attachment.close()
    del attachment
    assert tensor.tobytes() == kept
    assert not tensor.flags.writeable
    if tested_backend != "cuda_ipc":  # where the emulated driver has one as long as it maps it
        assert descriptors() == set()
    assert is_mapped()
    del tensor
    assert not is_mapped()
