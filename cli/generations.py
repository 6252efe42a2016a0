"""Generations as the commands show them: as JSON objects and as rows of tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from preload.protos import weight_cache_pb2 as pb

from .render import duration, size


def state_name(generation: pb.Generation) -> str:
    return pb.GenerationState.Name(generation.state).removeprefix("GENERATION_STATE_")


def name_of(generation: pb.Generation) -> str:
    """What to call it, and every command takes: the start of its id; or @ and its serial if it has no id yet, or is
    FAILED and may share its id with one that was loaded since."""
    if generation.state == pb.GENERATION_STATE_FAILED or not generation.id:
        return f"@{generation.serial}"
    return generation.id[:12]


def phases_list(phases: Sequence[pb.Phase]) -> list[dict[str, Any]]:
    return [{"name": p.name, "start_ns": p.start_ns, "s": (p.end_ns - p.start_ns) / 1e9} for p in phases]


def generation_dict(generation: pb.Generation) -> dict[str, Any]:
    """Everything a script might want of a generation."""
    return {
        "id": generation.id,
        "name": name_of(generation),
        "state": state_name(generation),
        "age_s": generation.age_ms / 1000,
        "checkpoints": list(generation.checkpoint_paths),
        "checkpoint_digest": generation.checkpoint_digest,
        "model": generation.recipe.model,
        "quantization": generation.recipe.quantization,
        "compute_dtype": generation.recipe.compute_dtype,
        "config_overrides": json.loads(generation.recipe.config_overrides or "{}"),
        "device": generation.device,
        "resident_bytes": generation.resident_bytes,
        "num_segments": generation.num_segments,
        "num_tensors": generation.num_tensors,
        "num_attaches": generation.num_attaches,
        "load_phases": phases_list(generation.load_phases),
        "progress": {
            "phase": generation.progress.phase,
            "done_bytes": generation.progress.done_bytes,
            "total_bytes": generation.progress.total_bytes,
        }
        if generation.HasField("progress")
        else None,
        "leases": [
            {
                "id": lease.id,
                "pid": lease.pid,
                "client": lease.client,
                "age_s": lease.age_ms / 1000,
                "mapped": lease.mapped,
                "phases": phases_list(lease.phases),
            }
            for lease in generation.leases
        ],
        "failure": {
            "reason": pb.ErrorReason.Name(generation.failure.reason),
            "message": generation.failure.message,
        }
        if generation.HasField("failure")
        else None,
    }


def recipe_text(recipe: dict[str, Any]) -> str:
    """What tells one generation of a checkpoint from another: "keep/float32 raw rope_theta=5"."""
    model = [] if recipe["model"] in ("", "auto") else [recipe["model"]]
    overrides = [f"{key}={json.dumps(value)}" for key, value in recipe["config_overrides"].items()]
    return " ".join([f"{recipe['quantization']}/{recipe['compute_dtype']}", *model, *overrides])


HEADER = ("generation", "state", "for", "recipe", "bytes", "tensors", "leases", "checkpoint")


def generation_row(generation: pb.Generation) -> tuple[str, ...]:
    state = state_name(generation)
    if generation.HasField("progress") and generation.progress.total_bytes:
        state += f" {generation.progress.done_bytes / generation.progress.total_bytes:.0%}"
    return (
        name_of(generation),
        state,
        duration(generation.age_ms / 1000),
        recipe_text(generation_dict(generation)),
        size(generation.resident_bytes),
        str(generation.num_tensors),
        str(len(generation.leases)),
        ", ".join(generation.checkpoint_paths),
    )
