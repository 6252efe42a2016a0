import os
from pathlib import Path

import pytest

from preload.daemon.errors import CheckpointNotFoundError
from preload.daemon.generations import Receipt
from preload.daemon.receipts import changed, require_path, stale


def receipt(path: Path, digest: bytes = b"x") -> Receipt:
    seen = path.stat()
    return Receipt(str(path), seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, digest)


def test_untouched_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"1234")
    assert stale([receipt(path)]) == []


def test_restored_mtime_does_not_hide_a_write(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"1234")
    before = path.stat()
    proof = receipt(path)
    with path.open("r+b") as out:
        out.write(b"9")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert stale([proof]) == [str(path)]


def test_missing_file_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"1234")
    proof = receipt(path)
    path.unlink()
    assert stale([proof]) == [str(path)]


def test_change_names_the_files_whose_content_differs(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"1")
    a, b, c = (receipt(tmp_path / name) for name in "abc")
    other_b = receipt(tmp_path / "b", b"y")
    assert changed([a, b], [a, other_b, c]) == [b.path, c.path]


def test_broken_link_is_named_with_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointNotFoundError, match=r"link.*broken link to .*gone"):
        require_path(str(link))
