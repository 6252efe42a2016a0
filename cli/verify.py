"""`preload verify`: hash what is resident again and compare it with the manifest."""

from __future__ import annotations

import argparse
import json

from .options import add_daemon, add_json, add_target, control_of, target_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_daemon(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from .render import ProgressBar, count, size

    bar = ProgressBar("verify")
    verified = None
    with control_of(arguments) as control:
        for event in control.verify(target_of(arguments)):
            if event.WhichOneof("event") == "verified":
                verified = event.verified
            else:
                bar.update(event.progress.phase, event.progress.done_bytes, event.progress.total_bytes)
    bar.close()
    assert verified is not None, "a verify stream ends with its result, or with an error"
    if arguments.json:
        result = {"id": verified.generation_id, "tensors": verified.num_tensors, "bytes": verified.num_bytes}
        print(json.dumps(result))
    else:
        tensors = count(verified.num_tensors, "tensor")
        print(f"{verified.generation_id[:12]} is intact: {tensors}, {size(verified.num_bytes)}")
    return 0
