"""Phases of processes, side by side: as a table and as a picture."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preload.engine.errors import RequestError

from .render import milliseconds, table

_ROW_PIXELS = 26
_LEFT_PIXELS = 170
_WIDTH_PIXELS = 760
_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


@dataclass(frozen=True)
class Track:
    """One process: its name and its phases, each {"name", "start_ns", "s"} as in the JSON outputs."""

    name: str
    phases: Sequence[dict[str, Any]]


def phase_table(tracks: Sequence[Track]) -> str:
    """A row for each phase name in order of appearance, a column for each process, a total last.

    The total spans from the first start to the last end, waits between phases included; `first_token` is left out
    of it, because it waits for a user."""
    names = list(dict.fromkeys(phase["name"] for track in tracks for phase in track.phases))
    rows = []
    for name in names:
        cells = []
        for track in tracks:
            seconds = [phase["s"] for phase in track.phases if phase["name"] == name]
            cells.append(milliseconds(sum(seconds)) if seconds else "-")
        rows.append([name, *cells])
    rows.append(["total to ready", *(milliseconds(total_s(track.phases)) for track in tracks)])
    return table(["phase", *(track.name for track in tracks)], rows)


def total_s(phases: Sequence[dict[str, Any]]) -> float:
    """Seconds from the first start to the last end of the phases up to ready."""
    counted = [phase for phase in phases if phase["name"] != "first_token"]
    if not counted:
        return 0.0
    start_ns = min(phase["start_ns"] for phase in counted)
    return float(max((phase["start_ns"] - start_ns) / 1e9 + phase["s"] for phase in counted))


def write_picture(path: str, tracks: Sequence[Track]) -> None:
    """Raises RequestError if the file cannot be written."""
    try:
        Path(path).write_text(picture(tracks))
    except OSError as error:
        raise RequestError(f"--svg {path} cannot be written: {error.strerror}") from error


def picture(tracks: Sequence[Track]) -> str:
    """An SVG: a row for each process from its own first start, a bar for each phase, one scale for all."""
    longest_s = max((total_s(track.phases) for track in tracks), default=0.0) or 1.0
    names = list(dict.fromkeys(p["name"] for t in tracks for p in t.phases if p["name"] != "first_token"))
    color = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    scale = (_WIDTH_PIXELS - _LEFT_PIXELS - 20) / longest_s
    parts = []
    for row, track in enumerate(tracks):
        y = 10 + row * _ROW_PIXELS
        label = html.escape(track.name[:26])
        parts.append(f'<text x="8" y="{y + 15}">{label}</text>')
        start_ns = min((phase["start_ns"] for phase in track.phases), default=0)
        for phase in track.phases:
            if phase["name"] not in color:
                continue
            x = _LEFT_PIXELS + (phase["start_ns"] - start_ns) / 1e9 * scale
            width = max(phase["s"] * scale, 0.5)
            title = f"{html.escape(phase['name'])} {milliseconds(phase['s'])}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{color[phase["name"]]}">'
                f"<title>{title}</title></rect>"
            )
    y = 20 + len(tracks) * _ROW_PIXELS
    for index, name in enumerate(names):
        x = 8 + (index % 6) * 125
        top = y + (index // 6) * 20
        parts.append(f'<rect x="{x}" y="{top}" width="12" height="12" fill="{color[name]}"/>')
        parts.append(f'<text x="{x + 16}" y="{top + 11}">{html.escape(name)}</text>')
    height = y + 20 * (len(names) // 6 + 1) + 24
    parts.append(
        f'<text x="{_WIDTH_PIXELS - 8}" y="{height - 8}" text-anchor="end">{milliseconds(longest_s)} wide</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PIXELS}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )
