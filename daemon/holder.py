"""A holder: owns a context on one GPU and the memory behind IPC handles, so that these outlive the daemon.

    python -m preload.daemon.holder --runtime-dir DIR --device cuda:GPU-… [--control-fd N]
    preload holder --runtime-dir DIR --device DEVICE          (systemd/preload-holder@.service)

The daemon starts it when cuda_ipc memory of a device is first asked for, and speaks to it over one connection at a
time (protos/holder.proto): first the inherited one, in later lives one to the holder's socket. Only the daemon's own
user and root may connect (SO_PEERCRED), and the folder is theirs alone. A holder whose daemon is not kept by anybody
ends with it; one whose daemon comes back waits, until the keeper is gone as well. Its end is the end of its memory.

Exit codes: 0 not needed any more; 1 no driver, no such device, no room for a context, or the device is lost; 2 wrong
arguments, or another holder of this device.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import select
import socket
import sys
import time
from pathlib import Path

from google.protobuf.message import DecodeError

from preload.protos import holder_pb2 as pb
from preload.protos import weight_cache_pb2

from . import runtime_folder
from .doors import is_owner, peer_of
from .errors import BadRequestError, CacheError, DeviceError, InternalError, NotAllowedError, TooManyError
from .holder_blocks import Block, Blocks
from .notify import Notifier
from .runtime_folder import DAEMON_LOCK, KEEPER_LOCK

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 64 * 1024
_TICK_S = 0.5
_ABANDONED_S = 10.0
"""How long nobody must be there, neither keeper nor daemon, until nobody is expected."""


def names_of(device: str) -> tuple[str, str]:
    """A device's lock and socket in the runtime folder: short, because a socket's path is limited."""
    short = device.removeprefix("cuda:GPU-").replace("-", "")
    return f"holder-{short[:16]}.lock", f"holder-{short[:16]}.sock"


class Holder:
    """Serves one daemon at a time. Without a context it has nothing to serve but `failure`, which it says once."""

    def __init__(self, runtime_dir: Path, path: Path, control: socket.socket | None, device: str) -> None:
        self._runtime_dir = runtime_dir
        self._path = path
        self._listener = _listen(path)
        self._daemon = control
        self._is_service = self._is_kept = control is None  # a service manager's: it waits for whoever comes
        self._had_keeper = False
        self._alone_since_s: float | None = None
        self._id = secrets.token_hex(16)
        self._is_lost = False
        self.failure: CacheError | None = None
        try:
            self._blocks = Blocks(device)
        except CacheError as error:
            log.error("%s: %s", device, error.message)
            self.failure = error

    def run(self) -> int:
        """Serves until nobody needs it; the exit code."""
        while not self._is_over():
            self._listen_anew()
            sources = [self._listener, *([self._daemon] if self._daemon is not None else [])]
            ready, _, _ = select.select(sources, [], [], _TICK_S)
            if self._daemon in ready:
                self._answer()
            if self._listener in ready:
                self._accept()
            if self.failure is None and not self._blocks.free_doomed():
                self._look_for_loss()
        return 1 if self.failure is not None else 0

    def _listen_anew(self) -> None:
        """Somebody who cleaned up may have removed our socket, with the folder or without."""
        if self._runtime_dir.is_dir() and not self._path.exists():
            log.warning("%s was removed: listening anew", self._path)
            self._listener.close()
            self._listener = _listen(self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _is_over(self) -> bool:
        if self._is_lost:
            return True
        if self._daemon is not None:
            self._alone_since_s = None
            return False
        if self.failure is not None or not self._is_kept:
            return True
        if (
            (self._is_service and not self._had_keeper)
            or _is_held(self._runtime_dir, KEEPER_LOCK)
            or _is_held(self._runtime_dir, DAEMON_LOCK)
        ):
            self._alone_since_s = None
            return False
        self._alone_since_s = self._alone_since_s or time.monotonic()
        return time.monotonic() - self._alone_since_s > _ABANDONED_S

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            if not is_owner(peer_of(peer).uid):
                _refuse(peer, NotAllowedError(f"user {peer_of(peer).uid} may not use this holder"))
            elif self._daemon is not None:
                _refuse(peer, TooManyError("another daemon is connected to this holder"))
            else:
                self._daemon = peer

    def _answer(self) -> None:
        """One request, or the end of the connection."""
        assert self._daemon is not None
        try:
            data = self._daemon.recv(MAX_PACKET_BYTES + 1)
            if data:
                self._daemon.send(self._do(data).SerializeToString())
                return
        except OSError as error:
            log.warning("the daemon left: %s", error)
        self._daemon.close()
        self._daemon = None

    def _do(self, data: bytes) -> pb.Response:
        try:
            request = pb.Request.FromString(data)
            if self.failure is not None:
                raise self.failure
            match request.WhichOneof("request"):
                case "hello":
                    return pb.Response(welcome=self._welcome(request.hello))
                case "allocate":
                    return pb.Response(allocated=_message(self._blocks.allocate(request.allocate.size_bytes)))
                case "free":
                    for block_id in request.free.ids:
                        self._blocks.free(block_id)
                    return pb.Response(freed=pb.Freed())
                case other:
                    raise BadRequestError(f"a holder knows no request {other}")
        except CacheError as error:
            if isinstance(error, DeviceError) and self.failure is None:
                self._look_for_loss()
            return _failed(error)
        except DecodeError as error:
            return _failed(BadRequestError(f"not a request to a holder: {error}"))
        except Exception as error:  # what it holds must outlive a bug of its own
            log.exception("a holder hit a bug")
            return _failed(InternalError(f"the holder hit a bug: {error}"))

    def _look_for_loss(self) -> None:
        """A device that is gone has taken everything with it: then the holder says so by ending."""
        if self._blocks.is_lost():
            self.failure = DeviceError(f"{self._blocks.info.name} is lost to its holder; load again")
            log.error("%s", self.failure.message)
            self._is_lost = True

    def _welcome(self, hello: pb.Hello) -> pb.Welcome:
        self._is_kept = hello.is_kept
        self._had_keeper = _is_held(self._runtime_dir, KEEPER_LOCK)
        info = self._blocks.info
        return pb.Welcome(
            holder_id=self._id,
            pid=os.getpid(),
            device=info.name,
            total_bytes=info.total_bytes,
            granularity_bytes=info.granularity_bytes,
            blocks=[_message(block) for block in self._blocks.all()],
        )


def _message(block: Block) -> pb.Block:
    return pb.Block(id=block.id, size_bytes=block.size_bytes, handle=block.handle)


def _failed(error: CacheError) -> pb.Response:
    reason = weight_cache_pb2.ErrorReason.Value(error.reason)
    info = weight_cache_pb2.ErrorInfo(reason=reason, message=error.message, fields=error.fields)
    return pb.Response(failed=info)


def _refuse(peer: socket.socket, error: CacheError) -> None:
    """The kernel resets a connection that is closed with something unread: then the refusal would be lost."""
    with peer, contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RD)
        while peer.recv(MAX_PACKET_BYTES):
            pass
        peer.send(_failed(error).SerializeToString())


def _is_held(runtime_dir: Path, lock: str) -> bool:
    """Whether a process has this lock, told without touching it."""
    found = runtime_folder.open_holder(runtime_dir, lock)
    if found is None:
        return False
    os.close(found[1])
    return True


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(path))
    os.chmod(path, 0o600)
    sock.listen(8)
    return sock


def run(runtime_dir: str, device: str, control_fd: int | None = None) -> int:
    """Holds until it is not needed. Raises BadRequestError if another holder of the device has the folder."""
    os.umask(0o077)
    folder = runtime_folder.prepare(runtime_dir)
    lock_name, socket_name = names_of(device)
    control = socket.socket(fileno=control_fd) if control_fd is not None else None
    with runtime_folder.locked(folder, lock_name, f"another holder of {device} serves in"):
        holder = Holder(folder, folder / socket_name, control, device)
        try:
            if control is None and holder.failure is None:
                Notifier.from_environment().ready(f"holds memory of {device}")
            return holder.run()
        finally:
            holder.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m preload.daemon.holder", description=__doc__)
    parser.add_argument("--runtime-dir", required=True, help="the daemon's folder")
    parser.add_argument("--device", required=True, help="the GPU, as cuda:GPU- and its UUID")
    parser.add_argument("--control-fd", type=int, default=None, help="an inherited connection to the daemon")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s preload-holder %(levelname)s %(message)s")
    try:
        return run(options.runtime_dir, options.device, options.control_fd)
    except DeviceError as error:
        log.error("%s", error.message)
        return 1
    except BadRequestError as error:
        log.error("%s", error.message)
        return 2


if __name__ == "__main__":
    sys.exit(main())
