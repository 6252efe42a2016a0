"""Generations and the names they are asked by: links that die, paths with dots, one digest twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.errors import RequestError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")


def test_dead_links_do_not_keep_a_replaced_generation(
    daemon: Any, tmp_path: Path, write_safetensors: Callable[..., Path], wait_for: Callable[..., Any]
) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a": ("U8", [4], b"1234")})
    old = daemon.load(path, model="raw")
    for number in range(3):
        link = tmp_path / f"job{number}.safetensors"
        link.symlink_to(path)
        assert daemon.load(link, model="raw").id == old.id
        link.unlink()
    write_safetensors(path, {"a": ("U8", [4], b"5678")})
    new = daemon.load(path, model="raw")
    assert new.id != old.id
    wait_for(lambda: [g.id for g in daemon.generations()] == [new.id], "the old generation to go")


def test_a_path_with_dots_behind_a_link_means_what_the_kernel_means(
    daemon: Any, tmp_path: Path, write_safetensors: Callable[..., Path]
) -> None:
    (tmp_path / "real" / "v1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "v1")
    wanted = write_safetensors(tmp_path / "real" / "m.safetensors", {"a": ("U8", [4], b"1234")})
    write_safetensors(tmp_path / "m.safetensors", {"a": ("U8", [4], b"5678")})
    dotted = f"{tmp_path}/link/../m.safetensors"
    assert Path(dotted).read_bytes() == wanted.read_bytes()
    daemon.load(dotted, model="raw")
    with attach(dotted, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as found:
        assert bytes(found.tensors["a"]) == b"1234"


def test_dots_on_the_wire_are_refused(daemon: Any) -> None:
    with daemon.control() as control, pytest.raises(RequestError, match=r"'\.\.'"):
        control.check(pb.Selector(checkpoint_path="/a/../b", recipe=RAW.to_proto()))


def test_one_digest_under_two_ropes_is_refused_as_ambiguous(daemon: Any, tmp_path: Path, llama: Any) -> None:
    folders = [llama.folder(tmp_path / "one"), llama.folder(tmp_path / "two", rope_theta=77777.0)]
    first, second = (daemon.load(folder) for folder in folders)
    assert first.checkpoint_digest == second.checkpoint_digest
    assert first.id != second.id
    with pytest.raises(RequestError, match="ambiguous"):
        attach(checkpoint_digest=first.checkpoint_digest, runtime_dir=str(daemon.runtime_dir), tensors="buffers")
