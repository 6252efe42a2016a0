"""`Backoff`: how long to wait before the next core."""

from __future__ import annotations

from preload.engine.timeline import now_ns

from .core_process import CoreLife

MAX_BACKOFF_S = 30.0
_FIRST_BACKOFF_S = 0.5
_YOUNG_S = 10.0


class Backoff:
    """A core that has given tokens is replaced at once: what kills such cores is found by trials of its requests.

    Another one is young if it dies before it was ready (serving, or a warm standby) or within 10 s of it. One that
    was ready is replaced at once three times in a row, one that was not once; then the pause doubles from 0.5 s to
    30 s.
    """

    def __init__(self) -> None:
        self.num_young = 0

    def after(self, life: CoreLife) -> float:
        """Seconds to wait after the death of `life`."""
        died_at_ns = life.died_at_ns or now_ns()
        ready_at_ns = life.warm_at_ns or life.ready_at_ns
        is_old = ready_at_ns is not None and died_at_ns - ready_at_ns >= _YOUNG_S * 1e9
        if is_old or life.first_token_at_ns is not None:
            self.num_young = 0
            return 0.0
        self.num_young += 1
        excess = self.num_young - (1 if ready_at_ns is None else 3)
        return 0.0 if excess <= 0 else min(MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (excess - 1))
