"""Twenty seconds of the chaos bench: whatever is killed, clients get their texts and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

from preload.bench.chaos import run


def test_nothing_fails_and_nothing_leaks_while_processes_are_killed_at_random(demo_model: Path) -> None:
    result = run(str(demo_model), minutes=1 / 3, seed=3)
    assert (result["failed"], result["wrong"], result["leaked_bytes"]) == (0, 0, 0)
    assert result["bad_frontend_exits"] == 0
    assert result["sent"] > 0
    assert sum(result["kills"].values()) > 0
