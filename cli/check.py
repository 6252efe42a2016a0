"""`preload check`: would an attach succeed now, and if not, why? The exit code names the cause."""

from __future__ import annotations

import argparse
import json
import sys

from .options import add_daemon, add_json, add_target, control_of, target_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_daemon(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from preload.engine.errors import PreloadError

    from .exit_codes import describe

    try:
        selector = target_of(arguments)
        if selector.device not in ("", "host"):
            from preload.engine.cuda.devices import require_usable

            require_usable(selector.device)  # by this process: an engine's environment may be another
        with control_of(arguments) as control:
            generation_id = control.check(selector)
    except PreloadError as error:
        if not arguments.json:
            raise
        described = describe(error)
        print(json.dumps({"ok": False, **described, "error": described}))
        print(f"preload: {error}", file=sys.stderr)
        return int(described["exit_code"])
    if arguments.json:
        print(json.dumps({"ok": True, "id": generation_id, "exit_code": 0}))
    else:
        print(f"{generation_id[:12]} is READY")
    return 0
