"""Standbys are killed at every failpoint of their start and promotion, under clients that stream all the time."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def serving(service: Any) -> Any:
    """A core and a standby."""
    service.standby = 1
    service.start()
    return service


@pytest.mark.parametrize(
    "name", ["promotion.asked", "promotion.allocating", "promotion.allocated", "promotion.done", "core.stream_opened"]
)
def test_requests_outlive_a_core_and_the_standby_that_is_killed_in_its_promotion(
    serving: Any, clients: Any, name: str
) -> None:
    clients.start()
    clients.go_on()
    serving.points.arm(name)
    serving.kill_core()
    serving.points.killed(name)
    clients.go_on()
    clients.stop()
    serving.settled()


@pytest.mark.parametrize("name", ["core.attached", "core.warmed_up", "core.serving"])
def test_a_standby_killed_in_its_start_is_replaced(serving: Any, clients: Any, name: str) -> None:
    serving.points.arm(name)
    clients.start()
    serving.kill_core()
    serving.points.killed(name)
    clients.go_on()
    clients.stop()
    serving.settled()
