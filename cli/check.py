"""`preload check`: would an attach succeed now, and if not, why? The exit code names the cause.

Weights on a GPU are mapped once for that, and let go of: only the driver can tell whether this process may.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from .options import add_daemon, add_json, add_target, control_of, target_of

if TYPE_CHECKING:
    from preload.engine.client import Control
    from preload.protos import weight_cache_pb2 as pb


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
            from preload.engine.cuda.diagnosis import require_visible

            require_visible(selector.device)  # by this process: an engine's environment may be another
        with control_of(arguments) as control:
            generation_id = control.check(selector)
            _try_to_map(control, generation_id, selector)
    except PreloadError as error:
        if not arguments.json:
            raise
        described = describe(error)
        cause = {"cause": error.fields["cause"]} if "cause" in error.fields else {}
        print(json.dumps({"ok": False, **described, **cause, "error": described}))
        print(f"preload: {error}", file=sys.stderr)
        return int(described["exit_code"])
    if arguments.json:
        print(json.dumps({"ok": True, "id": generation_id, "exit_code": 0}))
    else:
        print(f"{generation_id[:12]} is READY")
    return 0


def _try_to_map(control: Control, generation_id: str, selector: pb.Selector) -> None:
    """Maps what is on a GPU as an engine would. Raises PreloadError."""
    from preload.engine.client import attach
    from preload.engine.client.control import make_selector

    if selector.checkpoint_path and selector.device in ("", "host"):
        return
    rank = selector.rank if selector.HasField("rank") else None
    found = make_selector(generation_id=generation_id, rank=rank, device=selector.device)
    generation = control.describe(found).generation
    if generation.device == "host" or not generation.backend:
        return
    from preload.engine.cuda.diagnosis import explained, require_usable

    require_usable(generation.device, generation.backend)
    daemon = control.list()
    with explained(generation.device, daemon.pid_namespace, daemon.ipc_namespace):
        attach(
            generation_id=generation_id,
            role=generation.rank.role,
            device=generation.device,
            runtime_dir=control.runtime_dir,
            tensors="device",
            client="preload check",
        ).close()
