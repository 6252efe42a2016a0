"""What runs out, jumps or vanishes: disk, descriptors, memory, clocks, folders, process ids. Nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.daemon import runtime_folder
from preload.daemon.runtime_folder import DAEMON_LOCK
from preload.engine.client import attach
from preload.engine.errors import DaemonUnreachableError, LoaderDiedError, TooManyError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

FAKES = Path(__file__).parents[1] / "fakes"
RAW = Recipe(model="raw")
DEADLINE_S = 60.0
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


def attached(daemon: Any, generation_id: str) -> Any:
    return attach(generation_id=generation_id, runtime_dir=str(daemon.runtime_dir), tensors="buffers")


def preload(daemon: Any, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "preload.cli.main", *words, "--runtime-dir", str(daemon.runtime_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def loader_with(prologue: str) -> list[str]:
    """A loader that a line of shell prepares."""
    return ["/bin/sh", "-c", prologue + ' && exec "$0" -m preload.engine.loading.loader "$@"', sys.executable]


def daemon_with(loader_command: list[str]) -> list[str]:
    return [sys.executable, str(FAKES / "run_daemon.py"), json.dumps({"loader_command": loader_command})]


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KiB."""
    with tempfile.TemporaryDirectory(prefix="preload-disk-") as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False)
        if mounted.returncode:
            pytest.skip("nothing can be mounted here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(4096))
    os.close(fd)
    return path


@needs_root
def test_a_full_disk_neither_ends_the_daemon_nor_takes_its_epoch(
    make_daemon: Callable[..., Any], small_disk: Path, raw_checkpoint: Path
) -> None:
    """Sockets, lock and log are on it. The next life starts there as well, under the next epoch."""
    daemon = make_daemon(runtime_dir=small_disk / "run")
    fill(small_disk)
    loaded = daemon.load(raw_checkpoint, model="raw")
    with attached(daemon, loaded.id) as attachment:
        assert len(attachment.tensors["a"]) == 4096
        daemon.kill()
        daemon.start()
        assert len(attachment.tensors["a"]) == 4096
    with daemon.control() as control:
        assert control.list().epoch == 2
    assert daemon.load(raw_checkpoint, model="raw").id == loaded.id


@needs_root
def test_a_daemon_that_has_no_room_for_its_folder_says_so(make_daemon: Callable[..., Any], small_disk: Path) -> None:
    run = small_disk / "run"
    run.mkdir(mode=0o700)
    fill(small_disk)
    command = [
        sys.executable,
        "-P",
        "-m",
        "preload.cli.main",
        "daemon",
        "--runtime-dir",
        str(run),
        "--http-port",
        "0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert f"runtime folder {run} cannot be written to: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", [["daemon"], ["keeper", "--"]], ids=["daemon", "keeper"])
def test_a_log_that_cannot_be_written_ends_nobody(
    tmp_path: Path,
    raw_checkpoint: Path,
    make_daemon: Callable[..., Any],
    words: list[str],
    wait_for: Callable[..., Any],
) -> None:
    """Standard error is /dev/full, also the loader's, which dies of nothing but says much."""
    daemon = make_daemon(wait=False)
    daemon.stop()  # it lends its folder and its way to ask
    where, *rest = words
    command = [sys.executable, "-P", "-m", "preload.cli.main", where, "--runtime-dir", str(daemon.runtime_dir), *rest]
    with Path("/dev/full").open("wb") as full:
        daemon.process = subprocess.Popen([*command, "--http-port", "0"], stdout=full, stderr=full)
    wait_for(daemon._answers, "the daemon to answer")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"x")
    assert preload(daemon, "load", str(bad), "--model", "raw").returncode == 16
    loaded = daemon.load(raw_checkpoint, model="raw")
    with attached(daemon, loaded.id) as attachment:
        assert len(attachment.tensors["a"]) == 4096


def test_a_daemon_out_of_descriptors_refuses_and_recovers(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, sparse_checkpoint: Callable[..., Path], wait_for: Any
) -> None:
    """Neither another connection nor a loader or a segment is to be had; who has something keeps it."""
    settings = json.dumps({"handover_deadline_s": 600})
    daemon = make_daemon(
        command=["prlimit", "--nofile=48:48", sys.executable, str(FAKES / "run_daemon.py"), settings]
    )
    loaded = daemon.load(raw_checkpoint, model="raw")
    other = sparse_checkpoint(2, 4096)
    with attached(daemon, loaded.id) as attachment, daemon.control() as control:
        control.list()
        crowd = []
        for _ in range(60):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(str(daemon.runtime_dir / "segments.sock"))
            crowd.append(sock)
        wait_for(lambda: "cannot accept: [Errno 24]" in daemon.log, "the daemon to run out of descriptors")
        with pytest.raises(TooManyError) as refused:
            list(control.load(other, RAW, timeout_s=DEADLINE_S))
        assert "as many open descriptors as its limit allows, 48" in refused.value.message
        for sock in crowd:
            sock.close()
        wait_for(lambda: num_descriptors(daemon) < 40, "the crowd to be gone")
        assert daemon.load(other, model="raw").state == pb.GENERATION_STATE_READY
        assert attachment.lease.id in {lease.id for g in daemon.generations() for lease in g.leases}
        with attached(daemon, loaded.id) as another:
            assert len(another.tensors["a"]) == 4096
    assert "Traceback" not in daemon.log


def num_descriptors(daemon: Any) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_a_segment_that_cannot_be_created_is_no_memory(tmp_path: Path) -> None:
    """What the daemon makes of EMFILE from memfd_create."""
    import resource

    from preload.daemon.segments.host import HostSegment

    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            HostSegment.allocate(4096, "x")
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 24


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of version 1 with 200 MB of memory and no swap."""
    folder = MEMORY_GROUPS / f"preload-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(200 << 20))
        yield folder
    finally:
        (folder / "memory.force_empty").write_text("0")
        folder.rmdir()


def test_a_loader_beyond_its_groups_memory_fails_with_the_reason(
    make_daemon: Callable[..., Any],
    memory_group: Path,
    raw_checkpoint: Path,
    sparse_checkpoint: Callable[..., Path],
    wait_for: Callable[..., Any],
) -> None:
    daemon = make_daemon(command=daemon_with(loader_with(f"echo $$ > {memory_group}/cgroup.procs")))
    good = daemon.load(raw_checkpoint, model="raw")
    before = daemon.device()
    with pytest.raises(LoaderDiedError) as died:
        daemon.load(sparse_checkpoint(4, 100 << 20), model="raw")
    assert "killed by SIGKILL, as the kernel does when memory runs out" in died.value.message
    assert daemon.device() == before, "nothing of it stays resident or reserved"
    failed = [g for g in daemon.generations() if g.state == pb.GENERATION_STATE_FAILED]
    assert [g.failure.reason for g in failed] == [pb.LOADER_DIED]
    with attached(daemon, good.id) as attachment:
        assert len(attachment.tensors["a"]) == 4096
    assert daemon.load(sparse_checkpoint(1, 1 << 20, "small"), model="raw").state == pb.GENERATION_STATE_READY


def test_no_part_measures_time_by_the_wall_clock() -> None:
    """It may be set at any moment. What is shown to people, creation times in answers, and what is compared
    with the times of files may use it."""
    root = Path(__file__).parents[2]
    allowed = {
        "engine/frontend/assembly.py", "engine/frontend/chat.py", "engine/frontend/completions.py",
        "engine/frontend/chat_template.py", "engine/loading/settled.py", "bench/peers/run.py",
        "engine/kernels/triton/cache.py",
    }  # fmt: skip
    found = set()
    for part in ("daemon", "engine", "cli", "bench"):
        for path in (root / part).rglob("*.py"):
            text = path.read_text()
            if any(word in text for word in ("time.time(", "time.time_ns(", "datetime.now(", "CLOCK_REALTIME")):
                found.add(str(path.relative_to(root)))
    assert found <= allowed


def test_a_clock_that_jumps_changes_nothing(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, wait_for: Callable[..., Any]
) -> None:
    """The daemon's wall clock goes back and forth by years with every look at it."""
    script = (
        "import itertools, sys, time; years = itertools.cycle((0, 10**9, -10**9)); now = time.time; "
        "time.time = lambda: max(0.0, now() + next(years)); from preload.cli.main import app; sys.exit(app())"
    )
    daemon = make_daemon("--ticket-ttl-s", "30", command=[sys.executable, "-P", "-c", script, "daemon"])
    loaded = daemon.load(raw_checkpoint, model="raw")
    for _ in range(3):
        with attached(daemon, loaded.id) as attachment:
            (lease,) = [lease for g in daemon.generations() for lease in g.leases]
            assert lease.age_ms < DEADLINE_S * 1000
            assert len(attachment.tensors["a"]) == 4096
        del attachment  # memory of a holder is leased as long as anything refers to it
        wait_for(lambda: not any(g.leases for g in daemon.generations()), "the lease to end")
    assert daemon.stop() == 0


def probe(address: str, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_daemon_whose_folder_is_deleted_serves_its_holders_and_says_so(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    """Alive, not ready, and by name in its log; a command is told that no daemon serves there."""
    daemon = make_daemon()
    loaded = daemon.load(raw_checkpoint, model="raw")
    with daemon.control() as control:
        address = control.list().http_address
        with attached(daemon, loaded.id) as attachment:
            log = daemon.runtime_dir / "daemon.log"
            log.rename(tmp_path / "daemon.log")
            for path in sorted(daemon.runtime_dir.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            daemon.runtime_dir.rmdir()
            wait_for(lambda: probe(address, "/ready")[0] == 503, "the daemon to notice")
            status, health = probe(address, "/health")
            assert (status, health["status"]) == (200, "ok")
            assert "daemon.sock is gone" in health["trouble"]
            assert "daemon.sock is gone" in (tmp_path / "daemon.log").read_text()
            assert len(attachment.tensors["a"]) == 4096
            leases = [lease.id for g in control.list().generations for lease in g.leases]
            assert leases == [attachment.lease.id], "who is connected is served on"
            refused = preload(daemon, "status")
            assert refused.returncode == 10
            assert f"no daemon serves in {daemon.runtime_dir}" in refused.stderr
            with pytest.raises(DaemonUnreachableError):
                attached(daemon, loaded.id)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(DEADLINE_S) == 0
    daemon.runtime_dir.mkdir(mode=0o700)
    daemon.start()
    assert daemon.load(raw_checkpoint, model="raw").id == loaded.id


def test_a_second_daemon_is_refused_by_any_name_of_the_folder(
    daemon: Any, raw_checkpoint: Path, tmp_path: Path
) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    link = tmp_path / "link"
    link.symlink_to(daemon.runtime_dir)
    for name in (link, daemon.runtime_dir / ".." / daemon.runtime_dir.name, link / "."):
        command = [sys.executable, "-P", "-m", "preload.cli.main", "daemon", "--runtime-dir", str(name)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert second.returncode == 2
        assert "another daemon serves in" in second.stderr
        with attached(daemon, loaded.id) as attachment:
            assert len(attachment.tensors["a"]) == 4096


def test_sockets_that_are_no_sockets_are_replaced(make_daemon: Callable[..., Any], tmp_path: Path) -> None:
    """Left by whatever was there before: a file, a link to somewhere else, whose target stays as it is."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "daemon.sock").write_text("not a socket")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours")
    (folder / "segments.sock").symlink_to(elsewhere)
    make_daemon(runtime_dir=folder)
    assert (folder / "daemon.sock").is_socket()
    assert (folder / "segments.sock").is_socket()
    assert elsewhere.read_text() == "not ours"


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_a_pid_in_a_lock_file_is_nobody_unless_it_holds_the_lock(
    innocent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Neither a process that has the number by now, nor one that only looks into the file."""
    path = tmp_path / DAEMON_LOCK
    path.write_text(str(innocent.pid))
    assert runtime_folder.open_holder(tmp_path, DAEMON_LOCK) is None
    assert not runtime_folder.is_locked(tmp_path, DAEMON_LOCK)
    with path.open() as opened:
        reader = subprocess.Popen(["sleep", "1000"], stdin=opened)
        try:
            path.write_text(str(reader.pid))
            with runtime_folder.locked(tmp_path, DAEMON_LOCK, "taken"):
                holder = runtime_folder.open_holder(tmp_path, DAEMON_LOCK)
                assert holder is not None
                assert holder[0] == os.getpid()
                os.close(holder[1])
                path.write_text(str(reader.pid))
                assert runtime_folder.open_holder(tmp_path, DAEMON_LOCK) is None
        finally:
            reader.kill()
            reader.wait()


def test_locks_that_name_an_innocent_process_harm_it_in_no_way(
    make_daemon: Callable[..., Any], innocent: subprocess.Popen[bytes], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """A keeper starts, stops and restarts its daemon over them."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    for name in ("daemon.lock", "keeper.lock"):
        (folder / name).write_text(str(innocent.pid))
    command = [sys.executable, "-P", "-m", "preload.cli.main", "keeper"]
    kept = make_daemon("--", "--http-port", "0", runtime_dir=folder, command=command)
    with kept.control() as control:
        pid = control.list().pid
    os.kill(pid, signal.SIGKILL)

    def next_pid() -> bool:
        with contextlib.suppress(DaemonUnreachableError), kept.control() as control:
            return bool(control.list().pid != pid)
        return False

    wait_for(next_pid, "the next daemon")
    assert kept.stop() == 0
    assert innocent.poll() is None
