"""What is found behind a path, and what is refused before a weight is read."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from preload.engine.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError
from preload.engine.loading.checkpoint import layout_names, open_checkpoint
from preload.engine.loading.files import CheckpointFile

Write = Callable[..., Path]
EIGHT = ("F32", [2], bytes(8))
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def shards(folder: Path, write: Write, index: dict[str, str] | None = None) -> None:
    """Two shards with tensors a and b."""
    write(folder / "one.safetensors", {"a": EIGHT})
    write(folder / "two.safetensors", {"b": EIGHT})
    index = index or {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def names(path: Path) -> list[str]:
    return sorted(tensor.name for tensor in open_checkpoint(str(path)).tensors)


def refusal(path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(str(path))
    return caught.value.message


def test_a_single_file_in_a_folder_is_found(folder: Path, write_safetensors: Write) -> None:
    write_safetensors(folder / "model.safetensors", {"a": EIGHT})
    write_safetensors(folder / "other.safetensors", {"b": EIGHT})
    assert names(folder) == ["a"]


def test_shards_are_found_by_their_index(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors)
    write_safetensors(folder / "unrelated.safetensors", {"c": EIGHT})
    checkpoint = open_checkpoint(str(folder))
    assert sorted(tensor.name for tensor in checkpoint.tensors) == ["a", "b"]
    assert {os.path.basename(file.path) for file in checkpoint.files} == {
        "one.safetensors", "two.safetensors", INDEX, "config.json",
    }  # fmt: skip


def test_files_of_any_name_are_found_without_an_index(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors)
    (folder / INDEX).unlink()
    assert names(folder) == ["a", "b"]


def test_a_file_is_opened_directly_with_the_config_beside_it(folder: Path, write_safetensors: Write) -> None:
    path = write_safetensors(folder / "x.safetensors", {"a": EIGHT})
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config == {}
    assert checkpoint.config_path == str(folder / "config.json")


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path: Path, demo_model: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(demo_model)
    assert open_checkpoint(str(tmp_path)).format == "gguf"
    (tmp_path / "n.gguf").symlink_to(demo_model)
    message = refusal(tmp_path)
    assert "holds 2 GGUF files (m.gguf, n.gguf)" in message


def test_links_of_a_hugging_face_cache_are_followed(tmp_path: Path, write_safetensors: Write) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_safetensors(blobs / "1234", {"a": EIGHT})
    (blobs / "5678").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "config.json").symlink_to("../../blobs/5678")
    checkpoint = open_checkpoint(str(snapshot))
    assert checkpoint.weights[0].file.path == str(snapshot / "model.safetensors")
    assert checkpoint.weights[0].file.stat.inode == (blobs / "1234").stat().st_ino


def test_a_folder_knows_the_names_that_decide_what_it_is(folder: Path, write_safetensors: Write) -> None:
    write_safetensors(folder / "model.safetensors", {"a": EIGHT})
    for name in ("README.md", "tokenizer.json", "other.gguf", "old.bin", INDEX):
        (folder / name).touch()
    found = open_checkpoint(str(folder)).folder
    assert found is not None
    assert layout_names(found) == sorted(["config.json", "model.safetensors", "other.gguf", "old.bin", INDEX])
    assert open_checkpoint(str(folder / "model.safetensors")).folder is None


def test_a_name_that_is_no_text_is_refused(folder: Path, write_safetensors: Write) -> None:
    write_safetensors(folder / "model.safetensors", {"a": EIGHT})
    (folder / os.fsdecode(b"\xff.txt")).touch()
    assert names(folder) == ["a"]
    (folder / os.fsdecode(b"\xff.safetensors")).touch()
    assert "'\\udcff.safetensors', whose name is not UTF-8; rename it" in refusal(folder)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere", CheckpointNotFoundError)
    assert message.startswith(f"{tmp_path / 'nowhere'} does not exist")


def test_a_broken_link_is_named_with_its_target(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("../blobs/gone")
    message = refusal(folder, CheckpointNotFoundError)
    assert f"{folder / 'model.safetensors'} is a broken symbolic link to ../blobs/gone" in message


def test_an_unreadable_file_is_named(folder: Path, write_safetensors: Write) -> None:
    path = write_safetensors(folder / "model.safetensors", {"a": EIGHT})
    path.chmod(0)
    for parent in path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)  # root may read anything
    try:
        message = refusal(path, CheckpointNotFoundError)
    finally:
        if was_root:
            os.seteuid(0)
    assert str(path) in message
    assert "permission denied" in message


def test_what_is_not_a_regular_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    assert f"{folder / 'model.safetensors'} is not a regular file" in refusal(folder, CheckpointNotFoundError)
    (folder / "model.safetensors").rmdir()
    os.mkfifo(folder / "model.safetensors")
    assert "is not a regular file" in refusal(folder, CheckpointNotFoundError)


def test_a_failing_disk_is_named(folder: Path, write_safetensors: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_safetensors(folder / "model.safetensors", {"a": EIGHT})

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    message = refusal(folder, CheckpointNotFoundError)
    assert f"{path} cannot be read: Input/output error" in message


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    assert f"{folder} holds no .safetensors and no .gguf file" in refusal(folder, CheckpointNotFoundError)


def test_a_folder_without_config_is_named(folder: Path, write_safetensors: Write) -> None:
    write_safetensors(folder / "model.safetensors", {"a": EIGHT})
    (folder / "config.json").unlink()
    assert f"{folder / 'config.json'} does not exist" in refusal(folder, CheckpointNotFoundError)
    assert open_checkpoint(str(folder), with_config=False).config is None


@pytest.mark.parametrize(("text", "what"), [("{", "no valid JSON"), ("[]", "must hold a JSON object"),
                                            ('{"a": 1, "a": 2}', "the key 'a' twice")])  # fmt: skip
def test_a_broken_config_is_named(folder: Path, write_safetensors: Write, text: str, what: str) -> None:
    write_safetensors(folder / "model.safetensors", {"a": EIGHT})
    (folder / "config.json").write_text(text)
    message = refusal(folder)
    assert str(folder / "config.json") in message
    assert what in message


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickle_is_refused_by_name(folder: Path, suffix: str) -> None:
    path = folder / f"pytorch_model{suffix}"
    path.write_bytes(b"anything")
    for target in (path, folder):
        message = refusal(target)
        assert f"{path} is a pickle checkpoint by its name" in message
        assert "convert it to safetensors" in message


def test_pickle_is_refused_by_content(folder: Path) -> None:
    path = folder / "model.safetensors"
    for protocol in (2, 3, 4, 5):
        path.write_bytes(pickle.dumps({"weight": list(range(100))}, protocol=protocol))
        assert f"{path} is a pickle checkpoint by its content" in refusal(folder)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    assert f"{path} is a pickle checkpoint by its content" in refusal(path)


def test_a_header_length_that_spells_pickle_is_no_pickle(folder: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    text += b" " * (0x0280 - len(text))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert names(folder) == ["a"]


@pytest.mark.parametrize("victim", ["model.safetensors", "config.json", INDEX])
def test_a_git_lfs_pointer_is_recognized(folder: Path, write_safetensors: Write, victim: str) -> None:
    if victim == INDEX:
        shards(folder, write_safetensors)
    else:
        write_safetensors(folder / "model.safetensors", {"a": EIGHT})
    (folder / victim).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    message = refusal(folder)
    assert f"{folder / victim} is a git-lfs pointer" in message
    assert "git lfs pull" in message


def test_a_missing_shard_is_named(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors)
    (folder / "two.safetensors").unlink()
    message = refusal(folder, CheckpointNotFoundError)
    assert f"{folder / 'two.safetensors'} is missing, though {INDEX} names it" in message


def test_a_tensor_that_the_index_does_not_name_is_named(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors)
    write_safetensors(folder / "two.safetensors", {"b": EIGHT, "c": EIGHT})
    message = refusal(folder)
    assert f"{folder / 'two.safetensors'}: tensor 'c' is not named by {INDEX}" in message


def test_a_tensor_that_its_shard_lacks_is_named(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    assert f"{folder / 'two.safetensors'}: tensor 'c' is missing" in refusal(folder)


def test_a_tensor_in_two_shards_is_named_with_both(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors)
    write_safetensors(folder / "two.safetensors", {"b": EIGHT, "a": EIGHT})
    message = refusal(folder)
    assert f"{folder / 'two.safetensors'}: tensor 'a' is also in {folder / 'one.safetensors'}" in message


def test_a_tensor_in_another_shard_than_the_index_says_is_named(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors, {"a": "two.safetensors", "b": "one.safetensors"})
    assert "belongs to two.safetensors" in refusal(folder)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "x.bin", 3])
def test_an_index_names_files_of_its_folder_only(folder: Path, write_safetensors: Write, shard: object) -> None:
    shards(folder, write_safetensors)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    message = refusal(folder)
    assert f"{folder / INDEX}: tensor 'a' is mapped to {shard!r}" in message


def test_an_index_without_a_map_is_refused(folder: Path, write_safetensors: Write) -> None:
    shards(folder, write_safetensors)
    (folder / INDEX).write_text("{}")
    assert f"{folder / INDEX} has no weight_map" in refusal(folder)


def test_a_checkpoint_without_tensors_is_refused(folder: Path, write_safetensors: Write) -> None:
    write_safetensors(folder / "model.safetensors", {})
    assert "holds no tensors" in refusal(folder)


def test_a_part_of_a_split_gguf_is_refused(tmp_path: Path, gguf_bytes: Callable[..., bytes]) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(gguf_bytes([("t", (2,), 0, bytes(8), None)], {"split.count": (2, b"\x02\x00")}))
    assert f"{path} is one of 2 parts of a split GGUF" in refusal(path)


@pytest.mark.parametrize("change", ["content", "touch", "replace", "remove"])
def test_a_file_that_changes_while_it_is_read_is_caught(tmp_path: Path, change: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"before")
    stat = path.stat()
    file = CheckpointFile(str(path))
    file.check_unchanged()
    if change == "content":
        path.write_bytes(b"after!")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "touch":
        os.utime(path)
    elif change == "replace":
        (tmp_path / "other").write_bytes(b"before")
        os.replace(tmp_path / "other", path)
    else:
        path.unlink()
    with pytest.raises(CheckpointChangedError, match=str(path)):
        file.check_unchanged()
