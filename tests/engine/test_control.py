"""The loader's end of its pipe."""

from __future__ import annotations

import os
import socket

import pytest

from preload.engine.errors import CheckpointError
from preload.engine.loading.control import (
    MAX_FIELDS,
    MAX_MESSAGE_BYTES,
    MAX_PACKET_BYTES,
    Control,
    DaemonGoneError,
    make_memfd,
)
from preload.protos import loader_pb2, weight_cache_pb2


@pytest.fixture
def pair() -> tuple[Control, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    return Control(ours.detach()), theirs


def test_an_endless_error_is_cut_to_fit_a_packet(pair: tuple[Control, socket.socket]) -> None:
    control, daemon = pair
    name = "ü\ud800" * 100_000
    fields = {f"{name}{index}": name for index in range(100)}
    control.fail(CheckpointError(f"/m: tensor {name} is bad; fetch the file again", fields))
    packet = daemon.recv(1 << 20)
    assert len(packet) < MAX_PACKET_BYTES
    failed = loader_pb2.Update.FromString(packet).failed
    assert failed.reason == weight_cache_pb2.BAD_CHECKPOINT
    assert failed.message.startswith("/m: tensor ü?ü?")
    assert failed.message.endswith("fetch the file again"), "what to do is not cut off"
    assert MAX_MESSAGE_BYTES - 8 <= len(failed.message.encode()) <= MAX_MESSAGE_BYTES
    assert 1 <= len(failed.fields) <= MAX_FIELDS


def test_long_names_of_corrupted_tensors_are_cut_to_fit_a_packet(pair: tuple[Control, socket.socket]) -> None:
    control, daemon = pair
    names = [f"{index}{'x' * 50_000}" for index in range(20)]
    control.verified(loader_pb2.VerifyResult(num_tensors=30, num_bytes=7, corrupted=names))
    packet = daemon.recv(4 << 20)
    assert len(packet) < MAX_PACKET_BYTES
    verified = loader_pb2.Update.FromString(packet).verified
    assert (verified.num_tensors, verified.num_bytes) == (30, 7)
    assert [name[:4] for name in verified.corrupted] == [name[:4] for name in names]


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
