"""`make kernels`: whoever ends it ends its compilers and its interpreter as well."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


def session(pid: int) -> dict[int, str]:
    """Command lines of the processes that live in a session."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid and fields[0] not in "ZX":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def ignores_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_table_that_is_ended_leaves_no_process(tmp_path: Path, wait_for: Callable[..., Any], name: str) -> None:
    # A shell's background jobs ignore interrupts, and we may be one.
    command = ["env", "--default-signal=INT", sys.executable, "-P", "-m", "preload.bench.kernels_table"]
    command += ["--only", "attention", "--workers", "2"]
    with (tmp_path / "said").open("w") as out:
        table = subprocess.Popen(
            [*command, "--cache", str(tmp_path / "cache")], stdout=out, stderr=out, start_new_session=True
        )
    try:

        def are_all_there() -> bool:
            parts = [pid for pid, line in session(table.pid).items() if "spawn_main" in line or "--errors" in line]
            return len(parts) == 3 and all(map(ignores_interrupts, parts))

        wait_for(are_all_there, "two compilers and the interpreter")
        number = getattr(signal, name)
        if name == "SIGINT":  # as a terminal sends it
            os.killpg(table.pid, number)
        else:
            os.kill(table.pid, number)
        status = table.wait(60)
        wait_for(lambda: not session(table.pid), "every process of the table to end")
        assert status == {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}[name]
        assert "Traceback" not in (tmp_path / "said").read_text()
    finally:
        for pid in session(table.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
