"""Which connections are old, for a guard that hangs up on the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from preload.daemon.doors import Doors, Peer
from preload.daemon.guard import Guard


def test_a_connection_seen_before_is_older_whatever_its_inode_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, peer = Guard("daemon.sock", Doors(tmp_path, [])), Peer(pid=1, uid=0, gids=frozenset())
    there = [(9000, 30, peer)]
    monkeypatch.setattr(guard, "_connections", lambda: iter(there))
    assert [fd for fd, _ in guard._oldest_first()] == [30]
    there[:0] = [(100, 12, peer), (7, 11, peer)]  # another processor's numbers, and descriptors that were free
    assert [fd for fd, _ in guard._oldest_first()] == [30, 11, 12]
    del there[-1]
    assert [fd for fd, _ in guard._oldest_first()] == [11, 12]
