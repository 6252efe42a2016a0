"""`preload check`: would an attach succeed now, and if not, why? The exit code names the cause."""

from __future__ import annotations

import argparse
import json

from .options import add_json, add_runtime_dir, add_target, target_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_runtime_dir(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.client import Control
    from preload.engine.errors import PreloadError
    from preload.protos import weight_cache_pb2 as pb

    from .exit_codes import code_of

    try:
        with Control(arguments.runtime_dir) as control:
            generation_id = control.check(target_of(arguments))
    except PreloadError as error:
        if not arguments.json:
            raise
        code = code_of(error)
        reason = pb.ErrorReason.Name(error.reason)
        print(json.dumps({"ok": False, "reason": reason, "message": error.message, "exit_code": code}))
        return code or 1
    if arguments.json:
        print(json.dumps({"ok": True, "id": generation_id, "exit_code": 0}))
    else:
        print(f"{generation_id[:12]} is READY")
    return 0
