"""Never the wrong weights: which files lead to which generation, and what a change on disk does."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.client.control import make_selector
from preload.engine.errors import CheckpointChangedError, CheckpointError, NotResidentError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

KEEP = Recipe()


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    """A model of random weights: no other test has its content."""
    return llama.folder(tmp_path / "model", llama.tensors(seed=int.from_bytes(os.urandom(4))))


def attached_id(daemon: Any, path: Path, recipe: Recipe = KEEP) -> str:
    with attach(path, recipe=recipe, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        return attachment.generation_id


def num_rehashes(daemon: Any, path: Path) -> int:
    return sum("hashing again" in line and str(path) in line for line in daemon.log.splitlines())


def flip_one_byte(path: Path, from_end: int = 1000) -> None:
    """In place; size and modification time stay what they were."""
    before = os.stat(path)
    with path.open("r+b") as file:
        file.seek(-from_end, os.SEEK_END)
        byte = file.read(1)
        file.seek(-from_end, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(path)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_one_byte_changed_behind_a_restored_mtime_is_refused_naming_the_file(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    assert attached_id(daemon, folder) == loaded.id
    weights = folder / "model.safetensors"
    flip_one_byte(weights)
    for _ in range(2):
        with pytest.raises(CheckpointChangedError, match=str(weights)) as refusal:
            attached_id(daemon, folder)
        assert refusal.value.fields["paths"] == str(weights)
        assert refusal.value.fields["generation"] == loaded.id
    command = [sys.executable, "-P", "-m", "preload.cli.main", "check", str(folder), "--json"]
    told = subprocess.run(
        [*command, "--runtime-dir", str(daemon.runtime_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert told.returncode == 17
    assert json.loads(told.stdout)["reason"] == "CHECKPOINT_CHANGED"
    flip_one_byte(weights)
    assert attached_id(daemon, folder) == loaded.id, "restored is accepted again"


def test_a_touched_but_equal_file_is_hashed_once_and_accepted(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    os.utime(folder / "model.safetensors")
    assert attached_id(daemon, folder) == loaded.id
    assert num_rehashes(daemon, folder) == 1
    assert attached_id(daemon, folder) == loaded.id
    assert daemon.load(folder).id == loaded.id
    assert num_rehashes(daemon, folder) == 1, "its receipts were renewed"
    with daemon.control() as control:
        receipts = control.describe(make_selector(folder)).receipts
    seen = {r.path: r.mtime_ns for r in receipts}
    assert seen[str(folder / "model.safetensors")] == os.stat(folder / "model.safetensors").st_mtime_ns


def test_a_file_replaced_by_an_equal_one_is_accepted(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    weights = folder / "model.safetensors"
    copy = weights.with_suffix(".new")
    copy.write_bytes(weights.read_bytes())
    copy.rename(weights)
    assert attached_id(daemon, folder) == loaded.id


def test_the_same_content_elsewhere_attaches_without_a_load(daemon: Any, folder: Path, llama: Any) -> None:
    loaded = daemon.load(folder)
    resident_bytes = daemon.device().resident_bytes
    num_generations = len(daemon.generations())
    stored = read_back(folder / "model.safetensors")
    copies = [
        llama.folder(folder.with_name("copy"), stored),
        llama.sharded(folder.with_name("shards"), stored, 3),
        llama.sharded(folder.with_name("reordered"), dict(reversed(stored.items())), 2),
        linked(folder, folder.with_name("links")),
    ]
    (folder.with_name("link")).symlink_to(folder)
    for path in [*copies, folder.with_name("link"), folder / ".." / folder.name]:
        assert attached_id(daemon, path) == loaded.id, path
    for path in copies:
        assert daemon.load(path).serial == loaded.serial
    assert daemon.device().resident_bytes == resident_bytes
    assert len(daemon.generations()) == num_generations


def read_back(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[start + begin : start + end])
    return tensors


def linked(folder: Path, path: Path) -> Path:
    """As the Hugging Face cache does it: names that point at blobs."""
    blobs = path.with_name(path.name + "-blobs")
    path.mkdir()
    blobs.mkdir()
    for file in folder.iterdir():
        (blobs / f"{len(file.name):064x}").write_bytes(file.read_bytes())
        (path / file.name).symlink_to(Path("..") / blobs.name / f"{len(file.name):064x}")
    return path


def test_a_link_that_points_elsewhere_now_is_a_change(daemon: Any, folder: Path, llama: Any) -> None:
    path = linked(folder, folder.with_name("links"))
    loaded = daemon.load(path)
    other = folder.with_name("other.safetensors")
    llama.write(other, llama.tensors(seed=int.from_bytes(os.urandom(4))))
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(other)
    with pytest.raises(CheckpointChangedError, match=str(path / "model.safetensors")):
        attached_id(daemon, path)
    assert daemon.load(path).id != loaded.id


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(config_overrides={"rope_theta": 20000.0}),
        Recipe(quantization="int8_per_channel"),
        Recipe(compute_dtype="bfloat16"),
        Recipe(model="raw"),
    ],
    ids=["rope", "quantization", "compute dtype", "raw"],
)
def test_another_recipe_is_another_generation(daemon: Any, folder: Path, recipe: Recipe) -> None:
    loaded = daemon.load(folder)
    with pytest.raises(NotResidentError):
        attached_id(daemon, folder, recipe)
    other = daemon.load(folder, **vars(recipe))
    assert other.checkpoint_digest == loaded.checkpoint_digest
    assert other.id != loaded.id
    assert attached_id(daemon, folder, recipe) == other.id
    assert attached_id(daemon, folder) == loaded.id


def test_another_spelling_of_the_recipe_is_the_same_generation(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    spelled = Recipe(model="llama", config_overrides={"rope_theta": 10000.0})
    assert attached_id(daemon, folder, spelled) == loaded.id
    with attach(
        checkpoint_digest=loaded.checkpoint_digest,
        recipe=spelled,
        runtime_dir=str(daemon.runtime_dir),
        tensors="buffers",
    ) as attachment:
        assert attachment.generation_id == loaded.id


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_rope_changed_in_the_configuration_is_refused_naming_it(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    edit_config(folder, rope_theta=20000.0)
    with pytest.raises(CheckpointChangedError, match=str(folder / "config.json")) as refusal:
        attached_id(daemon, folder)
    assert "model.safetensors" not in refusal.value.message
    other = daemon.load(folder)
    assert (other.id != loaded.id, other.checkpoint_digest) == (True, loaded.checkpoint_digest)


def test_an_irrelevant_key_of_the_configuration_may_change(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    edit_config(folder, _name_or_path="elsewhere", transformers_version="9")
    assert attached_id(daemon, folder) == loaded.id


def test_a_reload_after_a_change_supersedes_the_old_generation(
    daemon: Any, folder: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    old = daemon.load(folder)
    holder = hold(daemon, folder)
    digest = holder.ask("digest model.norm.weight")
    before = daemon.device().resident_bytes
    flip_one_byte(folder / "model.safetensors")
    new = daemon.load(folder)
    assert new.id != old.id
    assert holder.event() == ("superseded", new.id)
    assert holder.event() == ("retiring", "")
    assert attached_id(daemon, folder) == new.id
    assert daemon.device().resident_bytes == before + new.resident_bytes
    states = {g.id: g.state for g in daemon.generations()}
    assert states[old.id] == pb.GENERATION_STATE_RETIRING
    assert holder.ask("digest model.norm.weight") == digest
    holder.end()
    wait_for(lambda: old.id not in {g.id for g in daemon.generations()}, "the old generation to be freed")
    assert daemon.device().resident_bytes == before


def test_an_unleased_generation_that_is_superseded_is_freed_at_once(daemon: Any, folder: Path) -> None:
    old = daemon.load(folder)
    before = daemon.device().resident_bytes
    flip_one_byte(folder / "model.safetensors")
    daemon.load(folder)
    assert old.id not in {g.id for g in daemon.generations()}
    assert daemon.device().resident_bytes == before


def test_content_that_becomes_that_of_another_resident_generation_supersedes_too(
    daemon: Any, folder: Path, llama: Any, hold: Callable[..., Any]
) -> None:
    """No loader runs: the source is only bound anew. Its own last load must not keep the old one alive."""
    other = llama.folder(folder.with_name("other"), llama.tensors(seed=int.from_bytes(os.urandom(4))))
    old, new = daemon.load(folder), daemon.load(other)
    holder = hold(daemon, folder)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert daemon.load(folder).id == new.id
    assert holder.event() == ("superseded", new.id)
    assert {g.id: g.state for g in daemon.generations()}[old.id] == pb.GENERATION_STATE_RETIRING


def test_an_engine_without_the_files_keeps_attaching_by_digest(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    (folder / "model.safetensors").unlink()
    with attach(
        checkpoint_digest=loaded.checkpoint_digest, runtime_dir=str(daemon.runtime_dir), tensors="buffers"
    ) as attachment:
        assert attachment.generation_id == loaded.id


def test_a_file_that_goes_before_the_shards_is_a_change(daemon: Any, folder: Path, llama: Any) -> None:
    shards = llama.sharded(folder.with_name("shards"), read_back(folder / "model.safetensors"))
    loaded = daemon.load(shards)
    added = shards / "model.safetensors"
    llama.write(added, llama.tensors(seed=int.from_bytes(os.urandom(4))))
    with pytest.raises(CheckpointChangedError, match=str(added)) as refusal:
        attached_id(daemon, shards)
    assert refusal.value.fields["generation"] == loaded.id
    assert daemon.load(shards).id != loaded.id
    added.unlink()
    with pytest.raises(CheckpointChangedError, match=str(added)):
        attached_id(daemon, shards)


def test_one_more_file_of_weights_in_a_folder_is_a_change(daemon: Any, tmp_path: Path, llama: Any) -> None:
    tensors = llama.tensors(seed=int.from_bytes(os.urandom(4)))
    folder = llama.folder(tmp_path / "model", tensors)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    daemon.load(folder, model="raw")
    llama.write(folder / "more.safetensors", {"more": tensors["model.norm.weight"]})
    with pytest.raises(CheckpointChangedError, match=str(folder / "more.safetensors")):
        attached_id(daemon, folder, Recipe(model="raw"))


def test_a_second_gguf_in_a_folder_is_refused(daemon: Any, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    raw = Recipe(model="raw")
    write_gguf(tmp_path / "a.gguf", {"t": (0, [64], os.urandom(256))})
    daemon.load(tmp_path, model="raw")
    write_gguf(tmp_path / "b.gguf", {"t": (0, [64], os.urandom(256))})
    with pytest.raises(CheckpointError, match="holds 2 GGUF files"):
        attached_id(daemon, tmp_path, raw)
    (tmp_path / "b.gguf").unlink()
    assert attached_id(daemon, tmp_path, raw)


def test_a_file_that_means_nothing_may_come_and_go(daemon: Any, folder: Path) -> None:
    loaded = daemon.load(folder)
    (folder / "README.md").write_text("words")
    assert attached_id(daemon, folder) == loaded.id
    assert num_rehashes(daemon, folder) == 1
    assert attached_id(daemon, folder) == loaded.id
    assert num_rehashes(daemon, folder) == 1, "the folder's receipt was renewed"


def test_a_file_named_by_itself_does_not_care_for_its_neighbours(daemon: Any, folder: Path) -> None:
    weights = folder / "model.safetensors"
    loaded = daemon.load(weights)
    (folder / "more.safetensors").write_bytes(b"anything")
    assert attached_id(daemon, weights) == loaded.id
    assert num_rehashes(daemon, weights) == 0


def shared_mapping(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_a_store_through_a_mapping_that_was_dirty_before_the_load_is_seen(daemon: Any, folder: Path) -> None:
    weights = folder / "model.safetensors"
    with shared_mapping(weights) as view:
        view[-1] ^= 1
        loaded = daemon.load(folder)
        assert attached_id(daemon, folder) == loaded.id
        view[-1] ^= 1
        with pytest.raises(CheckpointChangedError, match=str(weights)):
            attached_id(daemon, folder)
        view[-1] ^= 1
        assert attached_id(daemon, folder) == loaded.id


def test_files_in_memory_are_proved_by_their_content_each_time(daemon: Any, llama: Any) -> None:
    """A stat of theirs does not show the store."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = llama.folder(Path(name), llama.tensors(seed=int.from_bytes(os.urandom(4))))
        weights = folder / "model.safetensors"
        with shared_mapping(weights) as view:
            view[-1] ^= 1
            loaded = daemon.load(folder)
            for _ in range(2):
                assert attached_id(daemon, folder) == loaded.id
            assert num_rehashes(daemon, folder) == 2
            before = os.stat(weights)
            view[-1] ^= 1
            assert os.stat(weights).st_ctime_ns == before.st_ctime_ns
            with pytest.raises(CheckpointChangedError, match=str(weights)):
                attached_id(daemon, folder)
