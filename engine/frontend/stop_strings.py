"""`StopScanner`: lets text through up to the first stop string, and holds back what might be the start of one.

No character of a stop string is ever let through, wherever tokens end. Of several stop strings the one that is
complete first wins, and of those that end together the longest, so that the answer does not depend on tokens.
"""

from __future__ import annotations


class StopScanner:
    """The text of one sample, character by character."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self._longest = max((len(item) for item in stop), default=0)
        self.stopped = False

    def add(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now. After a stop string `stopped` is set and nothing more comes.

        Text added while not `armed` is never part of a stop string.
        """
        if self.stopped:
            return ""
        if not (self._stop and armed):
            shown, self._held = self._held + text, ""
            return shown
        text = self._held + text
        found = self._first(text)
        if found is not None:
            self.stopped = True
            self._held = ""
            return text[:found]
        keep = self._start_of_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> int | None:
        found = [(start + len(item), start) for item in self._stop if (start := text.find(item)) >= 0]
        return min(found)[1] if found else None

    def _start_of_stop(self, text: str) -> int:
        """Index of the first character from which on `text` is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(item.startswith(tail) for item in self._stop):
                return start
        return len(text)
