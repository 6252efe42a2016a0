"""`preload status`: the daemon, what it holds, who uses it, and where their time went."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .options import add_daemon, add_json, control_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_daemon(parser)
    add_json(parser)
    parser.add_argument("--timeline", action="store_true", help="show the phases of loads and lease holders")
    parser.add_argument("--svg", metavar="FILE", help="write the timeline as a picture")


def run(arguments: argparse.Namespace) -> int:
    with control_of(arguments) as control:
        status = _status_dict(control.list())
    if arguments.svg:
        from .timeline import write_picture

        write_picture(arguments.svg, _tracks(status))
    if arguments.json:
        print(json.dumps(status))
    else:
        _print(status, arguments.timeline)
    return 0


def _status_dict(answer: Any) -> dict[str, Any]:
    from .generations import generation_dict

    return {
        "version": answer.version,
        "pid": answer.pid,
        "epoch": answer.epoch,
        "http_address": answer.http_address,
        "uptime_s": answer.uptime_ms / 1000,
        "devices": [
            {
                "name": device.name,
                "capacity_bytes": device.capacity_bytes,
                **({"holder_pid": device.holder_pid} if device.holder_pid else {}),
                "resident_bytes": device.resident_bytes,
                "reserved_bytes": device.reserved_bytes,
            }
            for device in answer.devices
        ],
        "missing_models": list(answer.missing_models),
        "generations": [generation_dict(generation) for generation in answer.generations],
    }


def _print(status: dict[str, Any], timeline: bool) -> None:
    from .generations import recipe_text
    from .render import size, table
    from .timeline import phase_table

    print(
        f"daemon {status['version']}, process {status['pid']}, epoch {status['epoch']}, "
        f"up {status['uptime_s']:.0f} s, probes at http://{status['http_address']}"
    )
    for device in status["devices"]:
        print(
            f"{device['name']}: {size(device['resident_bytes'])} resident, "
            f"{size(device['reserved_bytes'])} reserved, limit {size(device['capacity_bytes'])}"
        )
    if status["missing_models"]:
        print("not ready: " + ", ".join(dict.fromkeys(status["missing_models"])))
    for generation in status["generations"]:
        paths = ", ".join(generation["checkpoints"])
        head = f"{generation['name']}  {_state(generation)}  {recipe_text(generation)}"
        print(f"\n{head}  {_content(generation)}{paths}")
        if generation["failure"]:
            print(f"  {generation['failure']['reason']}: {generation['failure']['message']}")
        if generation["leases"]:
            rows = [
                [lease["id"], str(lease["pid"]), lease["client"], f"{lease['age_s']:.0f} s", _phases(lease)]
                for lease in generation["leases"]
            ]
            print(table(("lease", "pid", "client", "age", "phases"), rows))
    tracks = _tracks(status)
    if timeline and tracks:
        print("\n" + phase_table(tracks))


def _state(generation: dict[str, Any]) -> str:
    from .render import duration

    age = duration(generation["age_s"])
    return f"FAILED {age} ago" if generation["state"] == "FAILED" else f"{generation['state']} for {age}"


def _content(generation: dict[str, Any]) -> str:
    """What is resident, if anything is, and how long it took to load."""
    from .render import count, size
    from .timeline import total_s

    if not generation["num_tensors"]:
        return ""
    loaded = f"loaded in {total_s(generation['load_phases']):.2f} s  " if generation["load_phases"] else ""
    return f"{size(generation['resident_bytes'])}  {count(generation['num_tensors'], 'tensor')}  {loaded}"


def _phases(lease: dict[str, Any]) -> str:
    return " ".join(f"{phase['name']} {phase['s'] * 1000:.0f}" for phase in lease["phases"]) + (
        " ms" if lease["phases"] else ""
    )


def _tracks(status: dict[str, Any]) -> list[Any]:
    from .timeline import Track

    tracks = []
    for generation in status["generations"]:
        if generation["load_phases"]:
            tracks.append(Track(f"load {generation['name'][:8]}", generation["load_phases"]))
        tracks += [Track(f"pid {lease['pid']}", lease["phases"]) for lease in generation["leases"] if lease["phases"]]
    return tracks
