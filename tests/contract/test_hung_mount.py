"""A mount that does not answer, as one of a file server that is gone: a FUSE mount whose requests nobody reads."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

FAKES = Path(__file__).parents[1] / "fakes"
NUM_PATHS, NUM_CLIENTS = 150, 45
"""A connection has 100 streams, and one that has just ended is still among them while the next one begins."""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="only root can mount, with /dev/fuse"
)


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """Whoever looks for a name in this folder waits for ever."""
    point = tmp_path / "hung"
    point.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"hung", os.fsencode(point), b"fuse", 0, options):
            pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
        yield point
    finally:
        os.close(fd)  # whoever waits is told that the mount is gone
        libc.umount2(os.fsencode(point), 2)


def check(stub: Any, path: Path) -> pb.CheckResponse:
    selector = pb.Selector(checkpoint_path=str(path), recipe=Recipe(model="raw").to_proto())
    answer: pb.CheckResponse = stub.Check(pb.CheckRequest(selector=selector), timeout=60)
    return answer


def test_a_hung_mount_takes_nothing_from_others_and_does_not_hold_up_the_end(
    make_daemon: Callable[..., Any],
    stub_of: Callable[[Any], Any],
    hung: Path,
    raw_checkpoint: Path,
    tmp_path: Path,
) -> None:
    """Also not if links on a healthy disk lead there, and if those who ask leave before they are answered."""
    command = [sys.executable, str(FAKES / "run_daemon.py"), json.dumps({"disk_deadline_s": 1.0})]
    daemon = make_daemon(command=command)
    loaded = daemon.load(raw_checkpoint, model="raw")
    stub = stub_of(daemon)
    links = [tmp_path / f"link-{index}" for index in range(NUM_PATHS)]
    for index, link in enumerate(links):
        link.symlink_to(hung / f"{index}")
    selector = pb.Selector(checkpoint_path=str(hung / "left"), recipe=Recipe(model="raw").to_proto())
    with pytest.raises(grpc.RpcError):
        stub.Check(pb.CheckRequest(selector=selector), timeout=0.1)
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        answers = list(threads.map(lambda link: check(stub, link), links))
    assert {answer.failure.reason for answer in answers} <= {pb.CHECKPOINT_NOT_FOUND, pb.TOO_MANY}
    assert "has not answered" in answers[0].failure.message
    assert check(stub, raw_checkpoint).generation_id == loaded.id
    before = num_waiting(daemon.pid)
    assert 4 <= before <= NUM_PATHS
    for index in range(NUM_PATHS):
        assert "has not answered" in check(stub, hung / f"new-{index}").failure.message
    assert num_waiting(daemon.pid) <= before, "on a mount that is known to hang, nobody waits any more"
    assert check(stub, raw_checkpoint).generation_id == loaded.id
    assert daemon.stop() == 0


def num_waiting(pid: int) -> int:
    """Threads of a process that wait for an answer of FUSE."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while we looked
            count += "fuse_lookup" in (task / "stack").read_text()
    return count
