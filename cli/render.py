"""Text for people: tables, sizes, durations, and progress as a bar on a terminal or as lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

_BAR_CELLS = 30
_LINE_INTERVAL_S = 2.0


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; a column of numbers is aligned to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for row in cells:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.replace(",", "").split(" ")[0].lstrip("-").replace(".", "", 1).isdigit()


def size(num_bytes: float) -> str:
    """Bytes in binary units: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def duration(seconds: float) -> str:
    """In the largest unit that gives a whole number: 35 s, 12 min, 3 h, 2 d."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def count(number: int, what: str) -> str:
    """1 lease, 2 leases."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"


class ProgressBar:
    """Shows `done` of `total` bytes on stderr: one rewritten line on a terminal, a line now and then in a log."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._last_line_s = 0.0
        self._last_text = ""
        self._is_shown = False

    def update(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        self._is_shown = True
        share = done_bytes / total_bytes if total_bytes else 0.0
        text = f"{self._label}: {phase} {size(done_bytes)} of {size(total_bytes)} ({share:.0%})"
        if self._is_terminal:
            cells = int(share * _BAR_CELLS)
            bar = "█" * cells + "·" * (_BAR_CELLS - cells)
            print(f"\r\033[K{self._label} [{bar}] {share:4.0%} {size(done_bytes)} {phase}", end="", file=self._stream)
        elif text != self._last_text and (
            time.monotonic() - self._last_line_s >= _LINE_INTERVAL_S or (total_bytes and done_bytes == total_bytes)
        ):
            print(text, file=self._stream)
            self._last_line_s = time.monotonic()
            self._last_text = text
        self._stream.flush()

    def close(self) -> None:
        if self._is_terminal and self._is_shown:
            print(file=self._stream)
        self._is_shown = False
