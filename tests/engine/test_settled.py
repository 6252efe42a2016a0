"""A settled stat tells of every later write, also of those that go through a mapping."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from preload.engine.loading import settled
from preload.engine.loading.checkpoint import open_checkpoint
from preload.engine.loading.files import CheckpointFile, CheckpointFolder
from preload.engine.loading.settled import FileStat, NotSettledError, is_stat_blind, settle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "weights"
    found.write_bytes(bytes(8192))
    return found


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY)
    if is_stat_blind(number):
        pytest.skip("the tests' folder lies in memory, where no stat shows a store")
    yield number
    os.close(number)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    found = Path(f"/dev/shm/preload-test-{os.getpid()}")
    try:
        found.write_bytes(bytes(8192))
    except OSError as error:
        pytest.skip(f"there is no /dev/shm: {error}")
    yield found
    found.unlink()


def mapping(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 8192)


def test_a_store_into_a_page_that_was_dirty_before_is_seen(path: Path, fd: int) -> None:
    with mapping(path) as view:
        view[0] = 1
        before = FileStat.of(os.fstat(fd))
        view[0] = 2
        assert FileStat.of(os.fstat(fd)) == before, "a mere stat is blind to it: nothing to prove otherwise"
        proof = settle(fd)
        view[0] = 3
        assert FileStat.of(os.fstat(fd)) != proof


def test_a_write_right_after_the_look_has_another_time(path: Path, fd: int) -> None:
    for _ in range(20):
        os.truncate(path, 8192)
        proof = settle(fd)
        with path.open("r+b") as file:
            file.write(b"x")
        assert FileStat.of(os.fstat(fd)) != proof


def test_a_file_that_is_written_to_all_the_time_is_not_settled(
    path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_out = os.fdatasync

    def interrupted(number: int) -> None:
        write_out(number)
        with path.open("r+b") as file:
            file.write(b"x")

    monkeypatch.setattr(os, "fdatasync", interrupted)
    with pytest.raises(NotSettledError):
        settle(fd)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EINVAL])
def test_what_has_nothing_to_write_out_is_settled(fd: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", refuse)
    assert settle(fd) == FileStat.of(os.fstat(fd))


def test_a_disk_that_cannot_write_is_not_passed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(Exception, match=f"{path} cannot be read: Input/output error"):
        CheckpointFile(str(path))


def test_a_time_of_another_hosts_clock_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        pytest.fail("waited for a time that may never come")

    monkeypatch.setattr(settled.time, "sleep", sleep)
    settled._pass_tick(time.time_ns() + 3_600_000_000_000)


def test_files_in_memory_are_known_to_hide_stores(in_memory: Path, fd: int) -> None:
    with mapping(in_memory) as view:
        view[0] = 1
        file = CheckpointFile(str(in_memory))
        view[0] = 2
        file.check_unchanged()
    assert file.is_stat_blind
    assert not is_stat_blind(fd)
    file.close()


def test_a_name_that_comes_or_goes_is_a_change_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    for change in ((tmp_path / "b.safetensors").touch, (tmp_path / "a.safetensors").unlink):
        folder = CheckpointFolder(str(tmp_path))
        folder.check_unchanged()
        change()
        with pytest.raises(Exception, match=f"{tmp_path} changed while it was read"):
            folder.check_unchanged()


def test_a_refused_checkpoint_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Exception, match="is truncated"):
            open_checkpoint(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before
