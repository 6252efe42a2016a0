"""How an engine on a GPU starts, by phases: without compiled kernels, with them, with graphs made before or after.

Every start is one of a fresh core process: the first by a server's own start, the others after a SIGKILL of the core.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .processes import PrivateDaemon, Server, preload_command, tell
from .restart import first_token, restart, wait_for_phases


def run(device: str, checkpoint: str, serve_words: list[str], *, has_graphs: bool) -> list[dict[str, Any]]:
    """One row for each way of starting: `start`, `first_token_s` after SIGKILL (None for the first), and `phases`."""
    import subprocess

    rows = []
    modes = ("background", "before", "off") if has_graphs else ("background",)
    with PrivateDaemon("--device-limit", "95%") as daemon:
        words = ("load", checkpoint, "--device", device, "--runtime-dir", daemon.runtime_dir)
        subprocess.run(preload_command(*words), check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(Path(daemon.runtime_dir) / "kernels", ignore_errors=True)
        for number, mode in enumerate(modes):
            options = ("--device", device, "--graphs", mode, "--no-template", *serve_words)
            with Server(daemon, checkpoint, *options) as server:
                cached = "kernels cached" if number else "no kernel cached"
                tell(f"starts with graphs {mode}, {cached}")
                first_token(server)
                rows.append(_row(f"graphs {mode}, {cached}", None, wait_for_phases(server), server))
                seconds, phases = restart(server)
                rows.append(_row(f"graphs {mode}, after SIGKILL", seconds, phases, server))
    return rows


def _row(start: str, seconds: float | None, phases: list[dict[str, Any]], server: Server) -> dict[str, Any]:
    return {
        "start": start,
        "first_token_s": None if seconds is None else round(seconds, 4),
        "phases": {phase["name"]: round(phase["s"], 4) for phase in phases},
        "kernels": server.cores()[-1].get("kernels", ""),
    }
