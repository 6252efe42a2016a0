"""The daemon's end of a loader's pipe: what is no packet of the protocol is refused, its descriptors are closed."""

import asyncio
import os
import resource
import sys

import pytest

from preload.daemon.errors import InternalError, TooManyError
from preload.daemon.loader_process import MAX_PACKET_BYTES, LoaderProcess
from preload.protos import loader_pb2 as pb

SEND = """
import os, socket, sys
control = socket.socket(fileno=int(sys.argv[-1]))
control.recv(65536)
memfd = os.memfd_create("preload-test-leak")
socket.send_fds(control, [{data}], [memfd] * {num_fds})
control.recv(1)
"""


def num_leaked() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            continue
    return sum("preload-test-leak" in link for link in links)


def updates_of(data: str, num_fds: int) -> list[pb.Update]:
    """What the daemon gets from a loader that sends this one packet."""

    async def receive() -> list[pb.Update]:
        command = [sys.executable, "-P", "-c", SEND.format(data=data, num_fds=num_fds)]
        loader = await LoaderProcess.start(command, pb.Job())
        try:
            async for update, fds in loader.updates():
                assert len(fds) == num_fds == num_leaked()
                return [update]
            return []
        finally:
            await loader.stop()

    return asyncio.run(receive())


@pytest.mark.parametrize(
    ("data", "num_fds", "message"),
    [
        (f'b"x" * {MAX_PACKET_BYTES + 1}', 1, f"more than {MAX_PACKET_BYTES} bytes"),
        ('b"\\x12\\x00"', 17, "or 16 descriptors"),
        ('b"\\xff" * 10', 2, "not readable"),
    ],
    ids=["too long", "too many descriptors", "no message"],
)
def test_a_packet_beyond_the_protocol_is_refused_and_its_descriptors_are_closed(
    data: str, num_fds: int, message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        updates_of(data, num_fds)
    assert num_leaked() == 0


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    (update,) = updates_of('b"\\x12\\x00"', 2)
    assert update.WhichOneof("update") == "progress"
    assert num_leaked() == 0


def test_an_empty_packet_with_descriptors_ends_the_exchange_and_leaks_none() -> None:
    assert updates_of('b""', 2) == []
    assert num_leaked() == 0


def test_a_loader_that_cannot_be_started_for_want_of_descriptors_names_the_limit() -> None:
    async def start() -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            with pytest.raises(TooManyError, match=r"as its limit allows, 3; raise it"):
                await LoaderProcess.start([sys.executable], pb.Job())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    asyncio.run(start())
