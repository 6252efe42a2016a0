"""The daemon's side of its holders: one for each GPU whose memory is shared by IPC handles (see holder.py).

Finds the holder that an earlier life left, or starts one; allocates and frees through it; notices its end. A holder
is known by the id that it drew at its start: the same device with another id has none of our memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from preload.protos import holder_pb2 as pb
from preload.protos import weight_cache_pb2

from .doors import peer_of
from .errors import BY_REASON, CacheError, DeviceError, InternalError, TooManyError
from .holder import MAX_PACKET_BYTES, names_of
from .segments.closer import free_later
from .segments.cuda_ipc import CudaIpcSegment
from .segments.driver import DeviceInfo

log = logging.getLogger(__name__)

_ANSWER_S = 60.0
_HELLO_S = 10.0
_TAKEN_S = 2.0


class HolderLink:
    """A connection to one holder. Blocking, and usable from any thread; one request at a time."""

    def __init__(
        self, sock: socket.socket, device: str, is_kept: bool, process: subprocess.Popen[bytes] | None
    ) -> None:
        """Says hello. Raises CacheError if the holder has no context, or answers for another device."""
        self._lock = threading.Lock()
        self._socket = sock
        self._process = process
        sock.settimeout(_HELLO_S if process is None else _ANSWER_S)  # one that starts has a context to make
        self.device = device
        self.pid = pid = process.pid if process is not None else peer_of(sock).pid
        if not pid:
            raise DeviceError(
                f"the holder of {device} is in a PID namespace that the daemon does not see: start it here"
            )
        self.is_lost = False
        welcome = self._ask(pb.Request(hello=pb.Hello(is_kept=is_kept))).welcome
        if welcome.device != device:
            raise DeviceError(f"the holder at {device}'s socket holds memory of {welcome.device}: end process {pid}")
        sock.settimeout(_ANSWER_S)
        self.holder_id = welcome.holder_id
        self.info = DeviceInfo(device, welcome.total_bytes, welcome.granularity_bytes)
        self._unclaimed = {block.id: block for block in welcome.blocks}
        self.pidfd = os.pidfd_open(pid)

    def allocate(self, size_bytes: int) -> CudaIpcSegment:
        """Raises NoMemoryError, DeviceError."""
        block = self._ask(pb.Request(allocate=pb.Allocate(size_bytes=size_bytes))).allocated
        return self._segment(block)

    def claim(self, block_id: int, size_bytes: int) -> CudaIpcSegment | None:
        """A block of an earlier life, if it is what it was."""
        block = self._unclaimed.get(block_id)
        if block is None or block.size_bytes != size_bytes:
            return None
        del self._unclaimed[block_id]
        return self._segment(block)

    def free_unclaimed(self) -> None:
        """What no generation is made of: loads that an earlier life did not finish."""
        unclaimed, self._unclaimed = list(self._unclaimed), {}
        if unclaimed:
            log.warning("%s: %d blocks that nothing describes are freed", self.device, len(unclaimed))
            self._free(unclaimed)

    def _segment(self, block: pb.Block) -> CudaIpcSegment:
        def free(block_id: int) -> None:
            free_later(lambda: self._free([block_id]))

        return CudaIpcSegment(block.id, block.size_bytes, block.handle, self.holder_id, free)

    def _free(self, block_ids: Sequence[int]) -> None:
        if self.is_lost:
            return
        try:
            self._ask(pb.Request(free=pb.Free(ids=block_ids)))
        except CacheError as error:
            log.error("%s: blocks %s are not freed: %s", self.device, list(block_ids), error.message)

    def _ask(self, request: pb.Request) -> pb.Response:
        """Raises what the holder refused with, or DeviceError if it does not answer."""
        with self._lock:
            try:
                with suppress(BrokenPipeError):  # refused at the door: the answer is there all the same
                    self._socket.send(request.SerializeToString())
                data = self._socket.recv(MAX_PACKET_BYTES)
                if not data:
                    raise ConnectionResetError("it hung up")
                response = pb.Response.FromString(data)
            except (OSError, DecodeError) as error:
                self._socket.close()  # an answer that came too late would be taken for the next one
                raise DeviceError(
                    f"the holder of {self.device} (process {self.pid}) does not answer: {error}; until the daemon is "
                    "restarted, its memory can neither be given out nor taken back",
                    {"device": self.device},
                ) from error
        if response.HasField("failed"):
            reason = weight_cache_pb2.ErrorReason.Name(response.failed.reason)
            raise BY_REASON.get(reason, InternalError)(response.failed.message, dict(response.failed.fields))
        return response

    def close(self) -> None:
        """Lets go of the connection, and of a child that has ended."""
        self.is_lost = True
        self._socket.close()
        if hasattr(self, "pidfd"):
            os.close(self.pidfd)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)


class Holders:
    """Holders by device. `on_lost(device, failure)` is called in the event loop when one has ended."""

    def __init__(self, runtime_dir: str, is_kept: bool) -> None:
        self._runtime_dir = runtime_dir
        self._is_kept = is_kept
        self._lock = threading.Lock()
        self._links: dict[str, HolderLink] = {}
        self._is_settled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_lost: Callable[[str, CacheError], None] = lambda device, failure: None

    def watch(self, on_lost: Callable[[str, CacheError], None]) -> None:
        """From now on somebody hears of a holder's end, in the running event loop."""
        self._loop, self._on_lost = asyncio.get_running_loop(), on_lost

    def pid(self, device: str) -> int:
        """Of a device's holder; 0 if it has none."""
        link = self._links.get(device)
        return link.pid if link is not None else 0

    def describe(self, device: str) -> DeviceInfo:
        """Raises CacheError if there can be no holder."""
        return self._link(device).info

    def allocate(self, device: str, size_bytes: int) -> CudaIpcSegment:
        """Raises NoMemoryError, DeviceError."""
        return self._link(device).allocate(size_bytes)

    def revive(
        self, device: str, holder_id: str, blocks: Sequence[int], sizes: Sequence[int]
    ) -> list[CudaIpcSegment] | None:
        """What an earlier life parked; None, and a reason in the log, if its holder is gone or another one."""
        try:
            link = self._links.get(device) or self._find(device)
        except CacheError as error:
            log.warning("%s: %s", device, error.message)
            return None
        if link is None or link.holder_id != holder_id:
            log.warning("%s: the holder of its memory is gone", device)
            return None
        claimed = [link.claim(block, size) for block, size in zip(blocks, sizes, strict=True)]
        segments = [segment for segment in claimed if segment is not None]
        if len(segments) != len(claimed):
            for segment in segments:
                segment.close()
            return None
        return segments

    def settle(self) -> None:
        """Everything that was parked is revived: what else holders have is nobody's."""
        self._is_settled = True
        for link in self._links.values():
            link.free_unclaimed()

    def _link(self, device: str) -> HolderLink:
        with self._lock:
            link = self._links.get(device)
            if link is not None:
                return link
            link = self._connect(device) or self._start(device)
            if self._is_settled:
                link.free_unclaimed()
            return link

    def _find(self, device: str) -> HolderLink | None:
        """One that must be there, but may be about to make its socket again."""
        end_s = time.monotonic() + _TAKEN_S
        while (link := self._connect(device)) is None and time.monotonic() < end_s:
            time.sleep(0.05)
        return link

    def _connect(self, device: str) -> HolderLink | None:
        """The holder that serves already. One that has not seen yet that our predecessor is gone is asked again."""
        path = Path(self._runtime_dir).absolute() / names_of(device)[1]
        end_s = time.monotonic() + _TAKEN_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(str(path))
            except OSError:
                sock.close()
                return None
            try:
                return self._adopt(HolderLink(sock, device, self._is_kept, None))
            except TooManyError:
                sock.close()
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.05)
            except CacheError:
                sock.close()
                raise

    def _start(self, device: str) -> HolderLink:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = ("--runtime-dir", self._runtime_dir, "--device", device, "--control-fd", str(theirs.fileno()))
        command = [sys.executable, "-P", "-m", "preload.daemon.holder", *words]
        try:
            # A session of its own: no signal to the daemon's group, and no end of the daemon, is its end.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        except OSError as error:
            ours.close()
            raise DeviceError(f"cannot start a holder of {device}: {error}") from error
        finally:
            theirs.close()
        try:
            return self._adopt(HolderLink(ours, device, self._is_kept, process))
        except BaseException:
            ours.close()  # which it ends upon
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            raise

    def _adopt(self, link: HolderLink) -> HolderLink:
        self._links[link.device] = link
        log.info("%s: process %d holds %s", link.device, link.pid, link.holder_id[:8])
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.add_reader, link.pidfd, self._lose, link)
        return link

    def _lose(self, link: HolderLink) -> None:
        assert self._loop is not None
        self._loop.remove_reader(link.pidfd)
        if self._links.get(link.device) is link:
            del self._links[link.device]
        link.close()
        self._on_lost(
            link.device,
            DeviceError(
                f"the holder of {link.device} (process {link.pid}) has ended, and its memory with it; load again",
                {"device": link.device},
            ),
        )

    def close(self) -> None:
        """Lets go of every holder; those that are kept wait for our next life."""
        for link in self._links.values():
            if self._loop is not None:
                self._loop.remove_reader(link.pidfd)
            link.close()
        self._links.clear()
