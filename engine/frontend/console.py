"""What the frontend says on its standard error, and the log lines that go there, must never end what it does: the
file behind it may be on a disk that is full, or the pipe's reader gone."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO


class _Unfailing:
    """A text stream whose words may get lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_stderr_unfailing() -> None:
    """From now on a write to sys.stderr raises nothing. Idempotent."""
    if not isinstance(sys.stderr, _Unfailing):
        sys.stderr = _Unfailing(sys.stderr)
