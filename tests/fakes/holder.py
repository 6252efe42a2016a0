"""A process that holds a lease. Lines on stdin drive it; answers and lease events leave as JSON lines on stdout.

holder.py '{"runtime_dir": …, "checkpoint": …, "recipe": {…}, "tensors": "buffers"}'

touch        reads every byte of every tensor
digest NAME  answers with the SHA-256 of a tensor
write NAME   writes through a torch tensor, of which it should die
private      answers with the bytes of private memory, the segments' mappings aside
phases       reports a phase to the daemon
close        gives the lease back and stays
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from typing import Any

from preload.engine.client import Attachment, attach
from preload.engine.errors import PreloadError
from preload.engine.recipe import Recipe
from preload.engine.timeline import Phase

_lock = threading.Lock()


def say(**fields: Any) -> None:
    with _lock:
        print(json.dumps(fields), flush=True)


def main() -> int:
    options = json.loads(sys.argv[1])
    recipe = Recipe(**options.pop("recipe", {}))
    try:
        attachment = attach(options.pop("checkpoint", None), recipe=recipe, **options)
    except PreloadError as error:
        say(error=type(error).__name__, message=error.message, fields=error.fields)
        return 1
    lease = attachment.lease
    say(lease=lease.id, generation=attachment.generation_id, epoch=lease.attached.epoch,
        resident_bytes=attachment.resident_bytes)  # fmt: skip
    threading.Thread(target=_tell_events, args=(attachment,), daemon=True).start()
    for line in sys.stdin:
        answer(attachment, *line.split())
    return 0


def _tell_events(attachment: Attachment) -> None:
    for event in attachment.lease.events():
        say(event=event.kind, detail=event.detail)


def answer(attachment: Attachment, word: str, name: str = "") -> None:
    match word:
        case "touch":
            say(touched=sum(sum(memoryview(view)[::4096]) for view in attachment.tensors.values()))
        case "digest":
            say(digest=hashlib.sha256(attachment.tensors[name]).hexdigest())
        case "write":
            attachment.tensors[name].view(-1)[0] = 1
            say(wrote=name)
        case "private":
            say(private=_private_bytes())
        case "phases":
            attachment.lease.report_phases([Phase("warm-up", 1, 2)])
            say(reported=True)
        case "close":
            attachment.close()
            say(closed=True)


def _private_bytes() -> int:
    total, is_segment = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line[0] in "0123456789abcdef":
                is_segment = "/memfd:preload:" in line or "/memfd:fakecuda:" in line
            elif line.startswith(("Private_Dirty:", "Private_Clean:")) and not is_segment:
                total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    sys.exit(main())
