"""Some thousand requests through the scheduler without a model: see tests/fakes/scheduler_simulator.py."""

from __future__ import annotations

from typing import Any

import pytest

from preload.engine.core.scheduler import Policy


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("seed", [1, 2])
def test_requests_neither_block_nor_starve_each_other_and_leave_nothing(
    simulate: Any, policy: Policy, seed: int
) -> None:
    report = simulate(1000, policy, seed)
    assert report.num_finished + report.num_cancelled == 1000
    assert report.num_preemptions > 0
    assert report.num_hit_tokens > 0
    assert (report.num_held > 0) == (policy is Policy.PRIORITY)
