"""The loader's end of its pipe."""

from __future__ import annotations

import os
import socket

import pytest

from preload.engine.loading.control import MAX_MESSAGE_CHARACTERS, Control, DaemonGoneError, make_memfd
from preload.protos import loader_pb2, weight_cache_pb2


@pytest.fixture
def pair() -> tuple[Control, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    return Control(ours.detach()), theirs


def test_an_endless_message_is_cut_to_fit_a_packet(pair: tuple[Control, socket.socket]) -> None:
    control, daemon = pair
    control.fail(weight_cache_pb2.ErrorInfo(message="ü" * 100_000))
    update = loader_pb2.Update.FromString(daemon.recv(64 << 10))
    assert update.failed.message == "ü" * MAX_MESSAGE_CHARACTERS


def test_a_closed_socket_means_that_the_daemon_is_gone(pair: tuple[Control, socket.socket]) -> None:
    control, daemon = pair
    daemon.close()
    with pytest.raises(DaemonGoneError):
        control.progress("read", 1, 2)
    with pytest.raises(DaemonGoneError):
        control.receive_job()


def test_a_memfd_holds_its_bytes_and_cannot_be_changed() -> None:
    fd = make_memfd("x", b"content")
    assert os.pread(fd, 100, 0) == b"content"
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"C", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
