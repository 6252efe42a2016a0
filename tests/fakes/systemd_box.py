"""A private systemd to install services in: see boot_systemd.sh. Needs root, and a kernel that makes namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UNITS = Path("/etc/systemd/system")
DEADLINE_S = 60.0


class Box:
    """Runs commands in the namespaces of a systemd of its own. `share` is a folder that both sides see, under one
    name and readable for everybody; `files` is the box's root folder, seen from outside."""

    def __init__(self, boot: subprocess.Popen[bytes], share: Path, pid: int) -> None:
        self._boot = boot
        self.share = share
        self.pid = pid
        self.files = Path(f"/proc/{pid}/root")

    def words(self, *command: str | Path, user: str = "root") -> list[str]:
        """The command line that runs `command` inside."""
        kinds = ("--mount", "--uts", "--ipc", "--pid", "--cgroup", "--root")
        enter = ["nsenter", f"--target={self.pid}", *kinds, "--wd=/"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all", "--"]
        return [*enter, *(become if user != "root" else ()), *map(str, command)]

    def run(self, *command: str | Path, user: str = "root", check: bool = True) -> str:
        """The command's output; fails the test with it if the command fails."""
        done = subprocess.run(
            self.words(*command, user=user), capture_output=True, text=True, timeout=DEADLINE_S * 2, check=False
        )
        if check and done.returncode != 0:
            said = f"{done.stdout}{done.stderr}\n{self.logs()}"
            pytest.fail(f"{' '.join(map(str, command))} ended with {done.returncode}: {said}")
        return done.stdout

    def logs(self) -> str:
        """What systemd and the services said last."""
        texts = [(path.name, path.read_text()[-4000:]) for path in sorted(self.share.rglob("*.log"))]
        return "\n".join(f"--- {name}\n{text}" for name, text in texts)

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *words, check=check)

    def show(self, unit: str, key: str) -> str:
        return self.systemctl("show", "--value", f"--property={key}", unit).strip()

    def write(self, path: Path, text: str) -> None:
        """A file inside."""
        target = self.files / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def signal(self, unit: str, number: str) -> None:
        """To the main process of a unit only."""
        self.systemctl("kill", "--kill-who=main", f"--signal={number}", unit)


@contextlib.contextmanager
def boot(wait_for: Callable[..., Any]) -> Iterator[Box]:
    """A box in which nothing runs. Where it cannot be had, the test fails with the reason."""
    if os.geteuid() != 0:
        pytest.skip("only root can boot a systemd in namespaces of its own")
    if not os.path.exists("/lib/systemd/systemd"):
        pytest.fail("no /lib/systemd/systemd here: apt-get install systemd")
    share = Path(tempfile.mkdtemp(prefix="preload-share-", dir="/srv"))
    share.chmod(0o755)  # and not in a temporary folder, of which services have their own
    root = tempfile.mkdtemp(prefix="preload-box-", dir="/var/tmp")
    script = Path(__file__).with_name("boot_systemd.sh")
    with (share / "boot.log").open("wb") as log:
        process = subprocess.Popen(["bash", script, root, ROOT, sys.prefix, share], stdout=log, stderr=log)
    try:
        yield Box(process, share, _wait_until_running(process, share, wait_for))
    finally:
        process.kill()  # and the kernel its child, with everything in its process namespace
        process.wait()
        _remove(root)
        shutil.rmtree(share)


def _wait_until_running(process: subprocess.Popen[bytes], share: Path, wait_for: Callable[..., Any]) -> int:
    def pid() -> int | None:
        said = (share / "boot.log").read_text()
        assert process.poll() is None, f"systemd does not boot in namespaces here: {said}"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if not children or Path(f"/proc/{children[0]}/comm").read_text() != "systemd\n":
            return None
        return int(children[0])

    found = int(wait_for(pid, "systemd to be started"))
    box = Box(process, share, found)
    wait_for(lambda: "running" in box.systemctl("is-system-running", check=False), "systemd to be up")
    _let_others_in(box)
    return found


def _let_others_in(box: Box) -> None:
    """An interpreter below /root is nobody else's to run; inside, where / is a copy on write, it is."""
    ours = (ROOT, Path(sys.prefix), Path(os.path.realpath(sys.executable)))
    folders = {folder for path in ours for folder in path.parents}
    shared = [folder for folder in folders if folder.is_relative_to(ROOT) or folder.is_relative_to(sys.prefix)]
    box.run("chmod", "a+x", *sorted(folders - set(shared)))


def _remove(root: str) -> None:
    """The mounts went with the last process of their namespace, which may be dying still."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            os.rmdir(root)
            return
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
