"""Cores, standbys and the template they are forked from are killed at every one of their failpoints, under clients
that stream all the time: none of them gets an error or another answer."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def serving(service: Any) -> Any:
    """One core, no standby."""
    service.start()
    return service


STARTING = [
    "fork.begun", "fork.tied", "fork.became", "core.begun", "core.importing", "core.attached", "core.built",
    "core.kv_allocated", "core.warmed_up", "core.unserving", "core.serving",
]  # fmt: skip


@pytest.mark.parametrize("name", STARTING)
def test_requests_outlive_a_core_and_its_successor_that_is_killed_in_its_start(
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


def test_a_core_killed_as_its_stream_opens_is_replaced(serving: Any, clients: Any) -> None:
    serving.points.arm("core.stream_opened")
    serving.kill_core()
    serving.points.killed("core.stream_opened")
    clients.start()
    clients.go_on()
    clients.stop()
    serving.settled()


@pytest.mark.parametrize(
    ("name", "skip"),
    [
        ("core.stepping", 0), ("core.stepping", 5), ("core.committing", 0), ("core.committing", 7),
        ("core.stepped", 3), ("core.sent", 0), ("core.sent", 9),
    ],
)  # fmt: skip
def test_requests_outlive_a_core_that_is_killed_in_a_step(serving: Any, clients: Any, name: str, skip: int) -> None:
    clients.start()
    clients.go_on(1)
    serving.points.arm(name, skip=skip)
    serving.points.killed(name)
    clients.go_on()
    clients.stop()
    serving.settled()


@pytest.mark.parametrize("name", ["template.asked", "template.forked", "template.answered", "template.reaping"])
def test_requests_outlive_a_core_and_the_template_that_is_killed_as_it_is_needed(
    serving: Any, clients: Any, name: str
) -> None:
    clients.start()
    serving.points.arm(name)
    serving.kill_core()
    serving.points.killed(name)
    clients.go_on()
    clients.stop()
    serving.settled()
    if name == "template.answered":  # the core that was forked serves, and no other has been asked for
        serving.kill_core()
    serving.replace_template()
    serving.kill_core()  # so that the core which serves is a fork again
    serving.settled()
