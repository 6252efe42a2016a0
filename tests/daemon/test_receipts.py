import os
from dataclasses import replace
from pathlib import Path

import pytest

from preload.daemon.errors import CheckpointNotFoundError
from preload.daemon.generations import Receipt
from preload.daemon.receipts import blind, changed, require_path, stale


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


def test_a_folder_holds_until_a_name_comes_or_goes(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    proof = receipt(tmp_path)
    (tmp_path / "a").write_text("more")
    assert stale([proof]) == []
    (tmp_path / "b").touch()
    assert stale([proof]) == [str(tmp_path)]
    proof = receipt(tmp_path)
    (tmp_path / "b").unlink()
    assert stale([proof]) == [str(tmp_path)]


def test_a_file_of_which_no_stat_tells_is_proved_by_none(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.touch()
    proof = receipt(path)
    assert blind([proof]) == []
    assert blind([proof, replace(proof, stat_blind=True)]) == [str(path)]


def test_a_file_that_was_not_hashed_is_changed_if_its_state_is(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"1")
    a, b = receipt(tmp_path / "a"), receipt(tmp_path / "b")
    unread_a, unread_b = replace(a, content_digest=b""), replace(b, content_digest=b"", ctime_ns=b.ctime_ns + 1)
    assert changed([a, b], [unread_a, unread_b]) == [b.path]
    assert changed([a], [unread_a]) == [a.path], "something was, and nothing else is left"
