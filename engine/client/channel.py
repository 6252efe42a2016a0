"""The gRPC channel to a daemon, and its refusals as typed errors."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc

from preload.engine.errors import DaemonError, DaemonUnreachableError, NotAllowedError, from_proto
from preload.protos import weight_cache_pb2 as pb

DAEMON_SOCKET = "daemon.sock"
_WAIT_POLL_S = 0.02
ERROR_TRAILER = "preload-error-bin"
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.max_send_message_length", 1024 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    # A daemon that is starting is asked again soon: gRPC's own back-off begins at a second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two channels of one process to the same socket must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(runtime_dir: str) -> grpc.Channel:
    """A channel to the daemon of a runtime folder; connects on first use. Raises early: DaemonUnreachableError if
    there is no socket, NotAllowedError if this user may not connect to it."""
    path = Path(runtime_dir).absolute() / DAEMON_SOCKET
    try:
        owner = path.stat().st_uid
        allowed = os.access(path, os.W_OK, effective_ids=True) or not path.exists()  # replaced just now
    except PermissionError:
        allowed, owner = False, None
    except OSError as error:
        raise DaemonUnreachableError(
            f"no daemon serves in {runtime_dir}: is `preload daemon` running? ({error.strerror})"
        ) from error
    if not allowed:
        whose = "" if owner is None else f", which is user {owner}'s"
        raise NotAllowedError(
            f"user {os.geteuid()} may not use the daemon in {runtime_dir}{whose}: its operator can let users and "
            "groups in with --allow-uids and --allow-gids",
            {"uid": str(os.geteuid())},
        )
    return grpc.insecure_channel(f"unix:{path}", options=_OPTIONS)


def wait_for_daemon(runtime_dir: str, timeout_s: float) -> None:
    """Returns when somebody listens at the daemon's socket, or when the time is over: whoever asks then hears why
    nobody does."""
    deadline_s = time.monotonic() + timeout_s
    while not _listens(runtime_dir) and time.monotonic() < deadline_s:
        time.sleep(_WAIT_POLL_S)


def _listens(runtime_dir: str) -> bool | None:
    """Whether the socket has a process behind it; None if there is no socket. One that we may not use has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog says that somebody listens
        try:
            probe.connect(str(Path(runtime_dir).absolute() / DAEMON_SOCKET))
        except ConnectionRefusedError:
            return False
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return True
    return True


def raise_typed(error: Any, runtime_dir: str) -> NoReturn:
    """Raises the PreloadError that a failed rpc (a grpc.RpcError that is also its Call) stands for."""
    forget_frames(error)
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER:
            raise from_proto(pb.ErrorInfo.FromString(value)) from error
    code, details = error.code(), error.details()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        listens = _listens(runtime_dir)
        if listens is None:
            raise DaemonUnreachableError(
                f"the daemon in {runtime_dir} has ended; another has to be started, if no keeper does so"
            ) from error
        if not listens:
            raise DaemonUnreachableError(
                f"the daemon in {runtime_dir} is gone (its socket is a dead predecessor's); another has to be "
                "started, if no keeper does so"
            ) from error
        raise DaemonUnreachableError(f"the daemon in {runtime_dir} does not answer: {details}") from error
    raise DaemonError(f"the daemon in {runtime_dir} answered {code.name}: {details}") from error


def forget_frames(error: grpc.RpcError) -> None:
    """Of a stream, the error is the call itself. With a traceback the two refer to each other, and to every caller
    with all its variables: a lease among them would go on until the garbage collector comes."""
    error.__traceback__ = None


@contextmanager
def typed_errors(runtime_dir: str) -> Generator[None, None, None]:
    """Turns RpcError of its body into PreloadError."""
    try:
        yield
    except grpc.RpcError as error:
        raise_typed(error, runtime_dir)


def typed_stream(stream: Any, runtime_dir: str) -> Iterator[Any]:
    """Items of a response stream; cancels the rpc when the caller stops early."""
    try:
        with typed_errors(runtime_dir):
            yield from stream
    finally:
        stream.cancel()
