"""An attack on one listening socket: random moves for some seconds, and everything that must hold afterwards.

A move is a function of a `random.Random`, and sends one input; the seed is printed, so that a run can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Move = Callable[[random.Random], object]

DEADLINE_S = 60.0
MAX_GROWTH_BYTES = 64 << 20
"""Of anonymous memory, from the end of a short warm-up to the end of an attack of any length."""
SLACK_DESCRIPTORS = 4
WARM_UP_S = 0.5


@dataclass
class Target:
    """A process under attack. `good` asks it something and fails if the answer is not right."""

    name: str
    process: subprocess.Popen[bytes]
    log: Callable[[], str]
    good: Callable[[], None]
    release: Callable[[], None] = lambda: None
    """Lets go of what the moves hold on to."""


@dataclass
class Fuzzer:
    """Runs attacks; each lasts `seconds`."""

    seconds: float
    seed: int
    wait_for: Callable[..., Any]
    report: list[str] = field(default_factory=list)

    def attack(self, target: Target, moves: Sequence[Move]) -> None:
        rng = random.Random(f"{self.seed} {target.name}")
        log_start = len(target.log())
        target.good()
        num_warm, _ = self._for(WARM_UP_S, target, moves, rng)
        target.release()
        target.good()
        memory, descriptors = anonymous_bytes(target.process.pid), num_descriptors(target.process.pid)
        num_inputs, seconds = self._for(self.seconds, target, moves, rng)
        line = f"{target.name}: {num_warm + num_inputs} inputs in {seconds:.1f} s, seed {self.seed}"
        self.report.append(line)
        print(line)
        target.release()
        target.good()
        self.wait_for(
            lambda: num_descriptors(target.process.pid) <= descriptors + SLACK_DESCRIPTORS,
            f"{target.name} to close what it opened ({descriptors} descriptors before)",
        )
        self.wait_for(
            lambda: anonymous_bytes(target.process.pid) <= memory + MAX_GROWTH_BYTES,
            f"{target.name} to give memory back ({memory:,} bytes before)",
        )
        said = target.log()[log_start:]
        found = re.search(r"^.*(Traceback|never awaited|never retrieved|Fatal|assert)", said, re.MULTILINE)
        assert found is None, said[max(0, found.start() - 500) : found.start() + 4000]

    def _for(self, seconds: float, target: Target, moves: Sequence[Move], rng: random.Random) -> tuple[int, float]:
        start_s, num_inputs = time.monotonic(), 0
        while time.monotonic() - start_s < seconds:
            move = rng.choice(moves)
            # A server may hang up on what it is sent, at any moment.
            with contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError):
                move(rng)
            num_inputs += 1
            assert target.process.poll() is None, f"{target.name} ended with {target.process.returncode}"
        return num_inputs, time.monotonic() - start_s


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def junk(rng: random.Random, max_bytes: int = 4096) -> bytes:
    """Random bytes, of a length that is often small and sometimes the largest."""
    length = rng.choice((0, 1, 2, 3, 8, 9, 24, rng.randrange(64), rng.randrange(max_bytes), max_bytes))
    return rng.randbytes(length)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Flips, cuts, repeats and inserts."""
    out = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                del out[at:]
            case 2:
                out[at:at] = out[at : at + rng.randrange(1, 32)] * rng.randrange(1, 8)
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                del out[at : at + rng.randrange(1, 9)]
    return bytes(out)


TEXTS = (
    "",
    "host",
    "raw",
    "auto",
    "\0",
    "/",
    "/nowhere",
    "../..",
    "é" * 50,
    "x" * 5000,
    "{}",
    "\ud7ff",
    "%s%n",
    "0" * 64,
)


def random_message(rng: random.Random, kind: type[Message], depth: int = 0) -> Any:
    """A message of a kind with some of its fields set to anything."""
    message = kind()
    for item in message.DESCRIPTOR.fields:
        if rng.random() < 0.5 or depth > 4:
            continue
        if item.message_type is not None and item.message_type.GetOptions().map_entry:
            continue
        for _ in range(rng.randrange(4) if item.is_repeated else 1):
            _set_field(rng, message, item, depth)
    return message


def _set_field(rng: random.Random, message: Any, item: FieldDescriptor, depth: int) -> None:
    if item.message_type is not None:
        value = random_message(rng, item.message_type._concrete_class, depth + 1)
        if item.is_repeated:
            getattr(message, item.name).add().CopyFrom(value)
        else:
            getattr(message, item.name).CopyFrom(value)
        return
    value = _random_value(rng, item)
    if item.is_repeated:
        getattr(message, item.name).append(value)
    else:
        setattr(message, item.name, value)


def _random_value(rng: random.Random, item: FieldDescriptor) -> Any:
    match item.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return junk(rng, 2000) if item.type == FieldDescriptor.TYPE_BYTES else rng.choice(TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 99))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), rng.random()))
        case FieldDescriptor.CPPTYPE_INT32:
            return rng.choice((0, -1, 2**31 - 1, -(2**31), rng.randrange(100)))
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice((0, -1, 2**63 - 1, -(2**63), rng.randrange(100)))
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice((0, 1, 2**32 - 1, rng.randrange(100)))
        case _:
            return rng.choice((0, 1, 2**64 - 1, rng.randrange(100)))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, END_STREAM, END_HEADERS = 1, 4, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """One HTTP/2 frame; `length` in place of the right one."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers_of_rpc(path: str, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    """A header block, every field a literal without indexing."""
    pairs = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"), ("te", "trailers"),
        ("content-type", "application/grpc"), *extra,
    ]  # fmt: skip
    return b"".join(b"\0" + _hpack_string(name) + _hpack_string(value) for name, value in pairs)


def _hpack_string(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + data


class StreamDoor:
    """Moves against a gRPC server at a Unix socket, below and above HTTP/2."""

    def __init__(self, path: str, methods: dict[str, type[Message]], burst: int) -> None:
        self._path = path
        self._methods = methods
        self._burst = burst
        self._held: list[socket.socket] = []

    @property
    def moves(self) -> list[Move]:
        """Those that cost the most come the most seldom."""
        common = [self.garbage, self.frames, self.raw_call, self.raw_call, self.raw_call, self.hold]
        return [*common * 20, self.flood]

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(5.0)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        return sock

    def _say(self, data: bytes, rng: random.Random) -> None:
        with self.connect() as sock:
            cut = rng.randrange(len(data) + 1) if rng.random() < 0.2 else len(data)
            sock.sendall(data[:cut])
            if rng.random() < 0.3:
                sock.settimeout(0.02)
                sock.recv(65536)

    def garbage(self, rng: random.Random) -> None:
        self._say((PREFACE if rng.random() < 0.5 else b"") + junk(rng, 70_000), rng)

    def frames(self, rng: random.Random) -> None:
        data = PREFACE + frame(SETTINGS, 0, 0, b"")
        for _ in range(rng.randrange(1, 12)):
            length = rng.choice((None, None, None, 0, 5, 16384, 2**24 - 1))
            data += frame(
                rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 1, 3, 2**31 - 1)), junk(rng, 600), length
            )
        self._say(data, rng)

    def raw_call(self, rng: random.Random) -> None:
        """A call of a real method with a body that is wrong in some way, or not."""
        method = rng.choice(list(self._methods))
        extra = (
            [] if rng.random() < 0.8 else [(rng.choice(("grpc-timeout", "grpc-encoding", "x-bin", "a")), "y" * 300)]
        )
        block = headers_of_rpc(method if rng.random() < 0.9 else method[:-2], extra)
        body = self.body(rng, method)
        flags = 0 if rng.random() < 0.3 else END_STREAM
        data = (
            PREFACE
            + frame(SETTINGS, 0, 0, b"")
            + frame(HEADERS, END_HEADERS, 1, mutate(rng, block) if rng.random() < 0.1 else block)
        )
        for start in range(0, max(1, len(body)), 16000):
            last = start + 16000 >= len(body)
            data += frame(0, flags if last else 0, 1, body[start : start + 16000])
        self._say(data, rng)

    def body(self, rng: random.Random, method: str) -> bytes:
        payload = random_message(rng, self._methods[method]).SerializeToString()
        if rng.random() < 0.5:
            payload = mutate(rng, payload)
        if rng.random() < 0.02:
            payload = bytes(2 << 20)
        size = len(payload) if rng.random() < 0.9 else rng.choice((0, 2**32 - 1, len(payload) + 1))
        return bytes([0 if rng.random() < 0.95 else rng.randrange(256)]) + struct.pack(">I", size) + payload

    def hold(self, rng: random.Random) -> None:
        """Connections that stay, in the middle of something; the oldest goes when there are many."""
        sock = self.connect()
        self._held.append(sock)
        sock.sendall((PREFACE + frame(SETTINGS, 0, 0, b""))[: rng.randrange(40)])
        if len(self._held) > 20:
            self._held.pop(rng.randrange(len(self._held))).close()

    def flood(self, rng: random.Random) -> None:
        """Many at once, and gone again."""
        found = []
        try:
            for _ in range(self._burst):
                found.append(self.connect())
                if rng.random() < 0.5:
                    found[-1].setblocking(False)
                    found[-1].send(PREFACE)
        finally:
            for sock in found:
                sock.close()

    def close(self) -> None:
        for sock in self._held:
            sock.close()
        self._held.clear()


class PacketDoor:
    """Moves against a SOCK_SEQPACKET server that hands out descriptors: it must not hand out any.

    `gives`: unless some of the packets are right."""

    gives = False

    def __init__(self, path: str, packet: Callable[[random.Random], bytes], burst: int) -> None:
        self._path = path
        self._packet = packet
        self._burst = burst
        self._held: list[socket.socket] = []

    @property
    def moves(self) -> list[Move]:
        return [*[self.packet] * 40, *[self.silence] * 4, self.flood]

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._held.append(sock)
        sock.settimeout(5.0)
        sock.connect(self._path)
        while len(self._held) > 30:
            self._held.pop(0).close()
        return sock

    def packet(self, rng: random.Random) -> None:
        sock = self._connect()
        given = [0] * rng.choice((0, 0, 1, 2, 250))
        socket.send_fds(sock, [self.mutated(rng, self._packet(rng)) or b"x"], given)
        if rng.random() < 0.5:
            sock.settimeout(0.3)
            _, fds, _, _ = socket.recv_fds(sock, 65536, 253)
            for fd in fds:
                os.close(fd)
            assert fds == [] or self.gives, "descriptors were handed out"

    def mutated(self, rng: random.Random, data: bytes) -> bytes:
        return mutate(rng, data)

    def silence(self, rng: random.Random) -> None:
        self._connect()

    def flood(self, rng: random.Random) -> None:
        for _ in range(self._burst):
            self._connect()

    def close(self) -> None:
        for sock in self._held:
            sock.close()
        self._held.clear()


ODD_VERBS = ("GET", "POST", "PUT", "PRI", "OPTIONS", "G" * 300)
ODD_LINES = (
    "", "Content-Length: -1", "Content-Length: 1e9", "Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: x",
    "Upgrade: websocket", "Connection: upgrade, close", "Expect: 100-continue", "Authorization: Bearer " + "k" * 500,
    " folded: x", "bad header", "Content-Length: " + "9" * 30, "Authorization: Bearer \xff\xfe",
)  # fmt: skip
ODD_CHUNKS = (
    b"5\r\nhello\r\n", b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"5;" + b"x" * 5000, b"0\r\n\r\n", b"5\r\nhello"
)  # fmt: skip


class HttpDoor:
    """Moves against an HTTP server on loopback."""

    def __init__(self, port: int, paths: Sequence[str], burst: int) -> None:
        self._port = port
        self._paths = paths
        self._burst = burst
        self._held: list[socket.socket] = []

    @property
    def moves(self) -> list[Move]:
        common = [self.garbage, self.odd_head, self.odd_body, self.huge_head, self.hold, self.pipeline]
        return [*common * 20, self.flood]

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), timeout=5.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no port stays behind
        return sock

    def say(self, data: bytes, rng: random.Random) -> bytes:
        with self.connect() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
            if rng.random() < 0.5:
                sock.settimeout(0.05)
                return sock.recv(65536)
        return b""

    def garbage(self, rng: random.Random) -> None:
        self.say(junk(rng, 70_000), rng)

    def odd_head(self, rng: random.Random) -> None:
        path = rng.choice(self._paths) + rng.choice(("", "?a=%zz", "%00", "/..", "#", "\0"))
        version = rng.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/2.0", ""))
        head = f"{rng.choice(ODD_VERBS)} {path} {version}\r\nHost: {rng.choice(('x', '', 'x' * 2000))}\r\n"
        data = (head + rng.choice(ODD_LINES) + "\r\n\r\n").encode()
        self.say(mutate(rng, data) if rng.random() < 0.5 else data, rng)

    def odd_body(self, rng: random.Random) -> None:
        path = rng.choice(self._paths).encode()
        head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.say(head + rng.choice(ODD_CHUNKS) * rng.randrange(1, 4) + junk(rng, 100), rng)

    def huge_head(self, rng: random.Random) -> None:
        count, size = rng.choice(((1, 200_000), (5000, 10), (1, 60_000)))
        lines = b"".join(b"h%d: %s\r\n" % (i, b"v" * size) for i in range(count))
        self.say(b"GET / HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n", rng)

    def pipeline(self, rng: random.Random) -> None:
        one = b"GET " + rng.choice(self._paths).encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        self.say(one * rng.randrange(2, 20) + junk(rng, 50), rng)

    def hold(self, rng: random.Random) -> None:
        sock = self.connect()
        self._held.append(sock)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"[: rng.randrange(90)])
        if len(self._held) > 20:
            self._held.pop(rng.randrange(len(self._held))).close()

    def flood(self, rng: random.Random) -> None:
        found = []
        try:
            for _ in range(self._burst):
                found.append(self.connect())
        finally:
            for sock in found:
                sock.close()

    def close(self) -> None:
        for sock in self._held:
            sock.close()
        self._held.clear()
