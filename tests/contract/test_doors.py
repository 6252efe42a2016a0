"""Who may come in: other users and groups at the folder, the gRPC socket and the hand-over socket, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from preload.engine.client import Attachment, attach
from preload.engine.errors import TooManyError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb
from preload.protos import weight_cache_pb2_grpc as pb_grpc

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

FAKES = Path(__file__).parents[1] / "fakes"
NOBODY, STRANGER, GROUP = 65534, 65533, 54321
DEADLINE_S = 60.0

ATTACH = """
import json, sys
from preload.engine.client import Control, attach
from preload.engine.errors import PreloadError
try:
    with attach(generation_id=sys.argv[2], runtime_dir=sys.argv[1], tensors="buffers") as attachment:
        print(json.dumps({"bytes": len(attachment.tensors["a"])}))
except PreloadError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message}))
"""

CONNECT = """
import json, socket, sys
def found(kind, name):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        return sock.connect_ex(f"{sys.argv[1]}/{name}")
print(json.dumps([found(socket.SOCK_STREAM, "daemon.sock"), found(socket.SOCK_SEQPACKET, "segments.sock")]))
"""


@pytest.fixture
def make_open_daemon(make_daemon: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A daemon whose folder others can get to, as they get to /run."""
    with tempfile.TemporaryDirectory(prefix="preload-doors-") as folder:
        os.chmod(folder, 0o755)
        yield lambda *options, **fields: make_daemon(*options, runtime_dir=Path(folder) / "run", **fields)


def as_user(script: str, *words: object, uid: int, gid: int | None = None, groups: tuple[int, ...] = ()) -> Any:
    """What a script prints, as JSON, when another user runs it."""
    who = ["setpriv", "--reuid", str(uid), "--regid", str(gid or uid)]
    who += ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    command = [*who, sys.executable, "-c", script, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd="/")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_nobody_else_comes_in_by_default(make_open_daemon: Callable[..., Any], raw_checkpoint: Path) -> None:
    daemon = make_open_daemon()
    loaded = daemon.load(raw_checkpoint, model="raw")
    refused = as_user(ATTACH, daemon.runtime_dir, loaded.id, uid=NOBODY)
    assert refused["error"] == "NotAllowedError"
    assert f"user {NOBODY} may not use the daemon in {daemon.runtime_dir}" in refused["message"]
    assert "--allow-uids" in refused["message"]
    assert as_user(CONNECT, daemon.runtime_dir, uid=NOBODY) == [13, 13]


@pytest.mark.by_descriptor
def test_an_allowed_user_attaches_and_another_does_not(
    make_open_daemon: Callable[..., Any], raw_checkpoint: Path
) -> None:
    daemon = make_open_daemon("--allow-uids", str(NOBODY))
    loaded = daemon.load(raw_checkpoint, model="raw")
    assert as_user(ATTACH, daemon.runtime_dir, loaded.id, uid=NOBODY) == {"bytes": 4096}
    assert as_user(ATTACH, daemon.runtime_dir, loaded.id, uid=STRANGER)["error"] == "NotAllowedError"
    assert as_user(CONNECT, daemon.runtime_dir, uid=STRANGER, gid=NOBODY) == [13, 13]


@pytest.mark.by_descriptor
def test_members_of_an_allowed_group_attach_by_their_first_group_or_a_further_one(
    make_open_daemon: Callable[..., Any], raw_checkpoint: Path
) -> None:
    daemon = make_open_daemon("--allow-gids", str(GROUP))
    loaded = daemon.load(raw_checkpoint, model="raw")
    for who in ({"gid": GROUP}, {"gid": STRANGER, "groups": (7, GROUP)}):
        assert as_user(ATTACH, daemon.runtime_dir, loaded.id, uid=NOBODY, **who) == {"bytes": 4096}
    refused = as_user(ATTACH, daemon.runtime_dir, loaded.id, uid=NOBODY, gid=STRANGER, groups=(7, 8))
    assert refused["error"] == "NotAllowedError"


def test_an_allowed_user_sees_nothing_else_of_the_folder(make_open_daemon: Callable[..., Any]) -> None:
    daemon = make_open_daemon("--allow-uids", str(NOBODY))
    script = """
import json, os, sys
def attempt(action):
    try:
        return str(action())
    except OSError as error:
        return type(error).__name__
folder = sys.argv[1]
print(json.dumps([
    attempt(lambda: os.listdir(folder)),
    attempt(lambda: open(folder + "/daemon.lock").read()),
    attempt(lambda: open(folder + "/epoch").read()),
    attempt(lambda: open(folder + "/new", "w")),
    attempt(lambda: os.unlink(folder + "/daemon.sock")),
    attempt(lambda: os.rename(folder + "/daemon.sock", folder + "/other.sock")),
]))
"""
    assert as_user(script, daemon.runtime_dir, uid=NOBODY) == ["PermissionError"] * 6


@pytest.mark.by_descriptor
def test_a_reload_shuts_out_a_user_who_is_inside(
    make_open_daemon: Callable[..., Any], raw_checkpoint: Path, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """Its connection is ended, and its lease with it; what it maps stays its own."""
    config = tmp_path / "config.toml"
    config.write_text(f"[daemon]\nallow_uids = [{NOBODY}]\n")
    daemon = make_open_daemon("--config", str(config))
    loaded = daemon.load(raw_checkpoint, model="raw")
    script = ATTACH.replace("        print(", "        print('in', flush=True); sys.stdin.read(); print(")
    who = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    command = [*who, sys.executable, "-c", script, str(daemon.runtime_dir), loaded.id]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "in\n"
    config.write_text("[daemon]\nallow_uids = []\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: not any(g.leases for g in daemon.generations()), "the lease to end")
    assert "which is not allowed here" in daemon.log
    assert as_user(CONNECT, daemon.runtime_dir, uid=NOBODY) == [13, 13]
    assert json.loads(holder.communicate(timeout=DEADLINE_S)[0]) == {"bytes": 4096}


def test_a_keeper_that_starts_does_not_shut_the_door(make_open_daemon: Callable[..., Any]) -> None:
    from preload.daemon import runtime_folder

    daemon = make_open_daemon("--allow-uids", str(NOBODY))
    runtime_folder.prepare(str(daemon.runtime_dir))
    assert as_user(CONNECT, daemon.runtime_dir, uid=NOBODY) == [0, 0]


def test_a_daemon_that_allows_nobody_shuts_the_door_of_one_that_did(make_open_daemon: Callable[..., Any]) -> None:
    daemon = make_open_daemon("--allow-uids", str(NOBODY))
    daemon.kill()
    daemon.options = []
    daemon.start()
    assert as_user(CONNECT, daemon.runtime_dir, uid=NOBODY) == [13, 13]
    assert daemon.runtime_dir.stat().st_mode & 0o777 == 0o700
    with pytest.raises(OSError, match="No data"):
        os.getxattr(daemon.runtime_dir, "system.posix_acl_access")


def test_an_impossible_id_is_refused_by_name(make_daemon: Callable[..., Any]) -> None:
    daemon = make_daemon("--allow-uids", "4294967295", wait=False)
    assert daemon.process.wait(DEADLINE_S) == 2
    assert "allow_uids: 4294967295 is no id" in daemon.log
    assert "Traceback" not in daemon.log


@pytest.mark.by_descriptor
def test_a_process_with_too_many_connections_loses_the_newest_and_others_are_served(
    make_open_daemon: Callable[..., Any], raw_checkpoint: Path, wait_for: Callable[..., Any]
) -> None:
    """The lease that the greedy process held before stays."""
    daemon = make_open_daemon("--allow-uids", str(NOBODY))
    loaded = daemon.load(raw_checkpoint, model="raw")
    greedy = """
import json, select, socket, sys
from preload.engine.client import attach
with attach(generation_id=sys.argv[2], runtime_dir=sys.argv[1], tensors="buffers") as attachment:
    socks = []
    for _ in range(200):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(sys.argv[1] + "/daemon.sock")
        sock.send(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\x04" + bytes(5))
        socks.append(sock)
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLRDHUP)
    gone = set()
    while len(gone) < 169:
        gone |= {fd for fd, event in poll.poll(30000) if event & (select.POLLHUP | select.POLLRDHUP)}
        for fd in gone:
            try: poll.unregister(fd)
            except KeyError: pass
    print(json.dumps({"gone": len(gone), "lease": attachment.lease.id}))
"""
    found = as_user(greedy, daemon.runtime_dir, loaded.id, uid=NOBODY)
    assert found["gone"] == 169, "one connection of 32 was the lease's own"
    assert "has more than 32 connections" in daemon.log
    assert daemon.generations()[0].state == pb.GENERATION_STATE_READY


@pytest.mark.by_descriptor
def test_another_user_cannot_have_all_leases(
    make_open_daemon: Callable[..., Any], raw_checkpoint: Path, wait_for: Callable[..., Any]
) -> None:
    """Neither such as it uses, nor such as it only asks for."""
    command = [sys.executable, str(FAKES / "run_daemon.py"), json.dumps({"max_leases": 8})]
    daemon = make_open_daemon("--allow-uids", str(NOBODY), "--ticket-ttl-s", "0.2", command=command)
    loaded = daemon.load(raw_checkpoint, model="raw")
    greedy = """
import json, os, queue, sys
import grpc
from preload.engine.client import attach
from preload.engine.errors import TooManyError
from preload.protos import weight_cache_pb2 as pb
from preload.protos import weight_cache_pb2_grpc as pb_grpc
stub = pb_grpc.WeightCacheStub(grpc.insecure_channel(f"unix:{sys.argv[1]}/daemon.sock"))
words = pb.AttachOpen(selector=pb.Selector(generation_id=sys.argv[2]), pid=os.getpid(), client="greedy")
idle = []
while len(idle) < 20:
    requests = queue.SimpleQueue()
    requests.put(pb.AttachRequest(open=words))
    call = stub.Attach(iter(requests.get, None))
    try:
        next(call)
        idle.append(call)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
try:
    for event in idle[0]:
        pass
except grpc.RpcError as error:
    ended = error.details()
held, message = [], ""
while not message.startswith("user"):  # until tickets have expired
    try:
        held.append(attach(generation_id=sys.argv[2], runtime_dir=sys.argv[1], tensors="buffers"))
    except TooManyError as error:
        message = error.message
print(json.dumps({"held": len(held), "message": message, "ended": ended}), flush=True)
sys.stdin.read()
os._exit(0)
"""
    who = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    command = [*who, sys.executable, "-c", greedy, str(daemon.runtime_dir), loaded.id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        assert found["held"] == 4
        assert found["message"].startswith(f"user {NOBODY} has 4 leases")
        assert "others need the room" in found["ended"]
        held: list[Attachment] = []

        def attach_one_more() -> bool:
            with contextlib.suppress(TooManyError):  # until tickets have expired
                held.append(attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers"))
            return len(held) == 3

        wait_for(attach_one_more, "three leases more than one user can have")
        for attachment in held:
            attachment.close()
        process.communicate("", timeout=DEADLINE_S)


@pytest.mark.by_descriptor
def test_another_user_has_half_of_the_hand_overs(make_open_daemon: Callable[..., Any], raw_checkpoint: Path) -> None:
    daemon = make_open_daemon("--allow-uids", str(NOBODY))
    loaded = daemon.load(raw_checkpoint, model="raw")
    greedy = """
import json, os, socket, sys
sys.path.insert(0, "")
from preload.protos import weight_cache_pb2 as pb
def connect():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(sys.argv[1] + "/segments.sock")
    return sock
for _ in range(3):
    theirs, ours = socket.socketpair()
    if os.fork() == 0:
        held = [connect() for _ in range(43)]
        ours.close()
        theirs.send(b"x")
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    ours.recv(1)
    globals().setdefault("kept", []).append(ours)
sock = connect()
data = sock.recv(65536)
print(json.dumps(pb.HandoverResponse.FromString(data).error.message), flush=True)
sys.stdin.read()
"""
    who = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    command = [*who, sys.executable, "-c", greedy, str(daemon.runtime_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == f"user {NOBODY} has 128 hand-overs open; finish one first"
        with attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
            assert len(attachment.tensors["a"]) == 4096
        process.communicate("", timeout=DEADLINE_S)


@pytest.mark.by_descriptor
def test_processes_that_the_daemon_cannot_tell_apart_are_not_taken_for_one(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, wait_for: Callable[..., Any]
) -> None:
    """It runs in a pid namespace of its own, as in a container: all others are process 0 there."""
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    daemon = make_daemon(command=[*inside, sys.executable, "-P", "-m", "preload.cli.main", "daemon"])
    loaded = daemon.load(raw_checkpoint, model="raw")
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
        for sock in socks:
            sock.connect(str(daemon.runtime_dir / "daemon.sock"))
            sock.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        for _ in range(100):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(str(daemon.runtime_dir / "segments.sock"))
        with attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
            assert len(attachment.tensors["a"]) == 4096
        wait_for(lambda: "a peer was silent for 5 s" in daemon.log, "the guard to have looked several times")
        poll = select.poll()
        for sock in socks:
            poll.register(sock, select.POLLRDHUP)
        assert poll.poll(0) == []
        assert "hung up" not in daemon.log
    daemon.kill()


def test_more_loads_than_anybody_could_mean_are_refused(
    gated_daemon: Any, gate: Any, stub_of: Callable[[Any], Any], tmp_path: Path, raw_checkpoint: Path
) -> None:
    gate.stop_at(gate.HEADER)
    stub = pb_grpc.WeightCacheStub(grpc.insecure_channel(f"unix:{gated_daemon.runtime_dir / 'daemon.sock'}"))
    paths = [raw_checkpoint]
    for index in range(64):
        paths.append(tmp_path / f"{index}.safetensors")
        paths[-1].write_bytes(raw_checkpoint.read_bytes())
    calls, recipe = [], Recipe(model="raw").to_proto()
    for path in paths[:64]:
        request = pb.LoadRequest(checkpoint_path=str(path), recipe=recipe)
        calls.append(stub.Load(request, timeout=DEADLINE_S))
        next(calls[-1])
    refused = stub.Load(pb.LoadRequest(checkpoint_path=str(paths[64]), recipe=recipe), timeout=60)
    with pytest.raises(grpc.RpcError) as error:
        next(refused)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "64 jobs wait for a loader" in error.value.details()
    for call in calls:
        call.cancel()
    gate.open()
    assert gated_daemon.load(paths[64], model="raw").state == pb.GENERATION_STATE_READY


def test_an_allowed_users_engine_keeps_its_own_files_elsewhere(make_open_daemon: Callable[..., Any]) -> None:
    """Cores' sockets, compiled kernels and the template: the daemon's folder is not theirs to write to."""
    daemon = make_open_daemon("--allow-uids", str(NOBODY))
    script = """
import json, os, sys, tempfile
from pathlib import Path
own = tempfile.mkdtemp()
os.environ["XDG_RUNTIME_DIR"] = own
from preload.engine.frontend.server import _private_folder
from preload.engine.places import own_dir
from preload.engine.template.fingerprint import place_of
with _private_folder(sys.argv[1]) as folder:
    found = [own_dir(sys.argv[1]), str(Path(folder).parent), str(Path(place_of(sys.argv[1]).socket).parent)]
os.rmdir(own + "/preload"), os.rmdir(own)
print(json.dumps([path == own + "/preload" for path in found]))
"""
    assert as_user(script, daemon.runtime_dir, uid=NOBODY) == [True, True, True]


def test_the_owners_engine_keeps_its_files_in_the_daemons_folder(daemon: Any) -> None:
    from preload.engine.places import own_dir

    assert own_dir(str(daemon.runtime_dir)) == str(daemon.runtime_dir)
    assert own_dir(str(daemon.runtime_dir / "not yet")) == str(daemon.runtime_dir / "not yet")
