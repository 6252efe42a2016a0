"""A process that attaches whenever a line asks for it, and lets go again. Answers leave as JSON lines.

attach   attaches, sums up all bytes, lets go; answers with the sum and the number of tensors, or with the error
keep     attaches and stays so
view     attaches, gives the lease back and keeps one view; answers with its sum
look     answers with that view's sum again
drop     lets go of it
pid      answers with its own pid
fds      answers with the number of its descriptors
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from preload.engine.client import attach
from preload.engine.errors import PreloadError
from preload.engine.recipe import Recipe

_kept: list[Any] = []
_views: list[Any] = []


def answer(word: str, options: dict[str, Any]) -> dict[str, Any]:
    if word == "pid":
        return {"pid": os.getpid()}
    if word == "fds":
        return {"num_fds": len(os.listdir("/proc/self/fd"))}
    if word == "look":
        return {"sum": sum(_views[0])}
    if word == "drop":
        _views.clear()
        return {"dropped": True}
    try:
        attachment = attach(tensors="buffers", recipe=Recipe(model="raw"), **options)
    except PreloadError as error:
        return {"error": type(error).__name__, "message": error.message, "num_fds": len(os.listdir("/proc/self/fd"))}
    said = {
        "sum": sum(sum(view[::64]) for view in attachment.tensors.values()),
        "num_tensors": len(attachment.tensors),
        "device": attachment.device,
    }
    if word == "view":
        _views.append(attachment.tensors["a"])
        said = {"sum": sum(_views[0])}
    if word == "keep":
        _kept.append(attachment)
    attachment.close()
    return said


def main() -> int:
    options = json.loads(sys.argv[1])
    for line in sys.stdin:
        said = answer(line.strip(), options)
        gc.collect()
        print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
