"""The main job, end to end: weights stay, the engine comes and goes.

    python -m preload.bench.demo CHECKPOINT

Starts a daemon in a private folder, loads the checkpoint, serves it, streams an answer, kills the engine core,
streams another answer from the next core, and prints where the time went. Leaves no process and no memory behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from preload.cli.render import milliseconds, size
from preload.cli.timeline import Track, phase_table
from preload.engine.template.fingerprint import place_of

from .chaos import held, segments_of
from .processes import PrivateDaemon, Server, clean_up_when_terminated, wait_until
from .restart import drop_page_cache, load, wait_for_phases

_MAX_TOKENS = 24


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m preload.bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="checkpoint to show")
    checkpoint = os.path.abspath(parser.parse_args().checkpoint)
    clean_up_when_terminated()
    with PrivateDaemon() as daemon:
        say(f"daemon {daemon.pid} is up in {daemon.runtime_dir}")
        drop_page_cache(checkpoint)
        start_s = time.monotonic()
        load_phases = load(daemon, checkpoint)
        segments = segments_of([daemon.pid])
        with daemon.control() as control:
            resident_bytes = control.list().devices[0].resident_bytes
        say(f"{os.path.basename(checkpoint)} is resident: {size(resident_bytes)}")
        with Server(daemon, checkpoint) as server:
            say(f"engine core {server.core_pid()} serves on http://127.0.0.1:{server.port}")
            cold_s = ask(server, "What is the capital of France?", start_s)
            cold = wait_for_phases(server)
            template_pid = wait_for_template(daemon)
            say(f"template {template_pid} has imported what the next core needs")
            victim = server.core_pid()
            start_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            say(f"SIGKILL to engine core {victim}; the weights stay where they are")
            warm_s = ask(server, "Name three colours.", start_s)
            warm = wait_for_phases(server)
            say(f"engine core {server.core_pid()} answered")
    print()
    print(phase_table([Track("cold: loader", load_phases), Track("cold: core", cold), Track("warm: core", warm)]))
    print(f"\nfrom nothing resident to the first token: {milliseconds(cold_s)}")
    print(f"from SIGKILL of the core to the first token of a new request: {milliseconds(warm_s)}")
    return check_nothing_left(daemon, segments)


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def ask(server: Server, question: str, start_s: float) -> float:
    """Streams one answer to stdout; returns the seconds from `start_s` to its first piece."""
    first_s = 0.0
    print(f"    user: {question}\n    model: ", end="", flush=True)
    for text in server.stream_chat(question, _MAX_TOKENS):
        first_s = first_s or time.monotonic() - start_s
        print(text.replace("\n", "\n           "), end="", flush=True)
    print(flush=True)
    return first_s


def wait_for_template(daemon: PrivateDaemon) -> int:
    """The process that the server has started for the next core, when it is ready to fork it."""
    place = place_of(daemon.runtime_dir)
    wait_until(lambda: os.path.exists(place.socket), "the template to listen")
    return int(place.lock.read_text())


def check_nothing_left(daemon: PrivateDaemon, segments: dict[tuple[int, int], int]) -> int:
    """1 if somebody still holds the weights, or the demo's folder is still there."""
    wait_until(lambda: not processes_of(daemon.runtime_dir) or None, "processes to end")
    held_bytes = held(segments)
    if held_bytes or daemon.folder.exists():
        print(f"left behind: {held_bytes:,} bytes of weights, {daemon.folder}", file=sys.stderr)
        return 1
    say("every process has ended, and the memory is free again")
    return 0


def processes_of(runtime_dir: str) -> list[int]:
    """Processes with the runtime folder in their command line: daemon, frontend, core, template."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if runtime_dir.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


if __name__ == "__main__":
    sys.exit(main())
