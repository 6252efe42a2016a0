"""A hundred thousand requests through the scheduler without a model: see tests/fakes/scheduler_simulator.py."""

from __future__ import annotations

from typing import Any

import pytest

from preload.engine.core.scheduler import Policy


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", Policy)
def test_a_hundred_thousand_requests_neither_block_nor_starve_each_other(simulate: Any, policy: Policy) -> None:
    report = simulate(50_000, policy, seed=20)
    print(report)
    assert report.num_finished + report.num_cancelled == 50_000
    assert report.num_finished > 40_000
