"""Every process is killed at the failpoints of a rolling update, under clients that stream all the time.

The update is completed or rolled back, and no request fails. Only the frontend's own death takes its requests with
it: there a new one must find everything in order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def serving(service: Any, make_clients: Callable[[], Any]) -> Any:
    """A service whose updates go from one checkpoint to the other and back."""
    service.start()
    knowing = make_clients()
    for _ in range(2):
        knowing.learn()
        assert service.update(service.other).end() == "done"
        service.swap()
    service.answers = knowing.allowed
    return service


@pytest.fixture
def steady(serving: Any, clients: Any) -> Any:
    """Clients at work, who know the answers of both checkpoints."""
    clients.allowed = serving.answers
    clients.start()
    clients.go_on()
    return clients


def finish(serving: Any, clients: Any, how: str) -> None:
    """After an update that ended like that: the clients go on, and so does the service, with what it said."""
    clients.go_on()
    clients.stop()
    serving.settled()
    if how == "done":
        serving.swap()
    states = serving.kept.states()
    assert states[serving.checkpoint.name] == "READY"
    assert states.get(serving.other.name, "FAILED") in ("READY", "FAILED")


def test_an_update_is_rolled_back_when_its_loader_is_killed(serving: Any, steady: Any) -> None:
    serving.points.arm("loader.reading")
    how = serving.update(serving.other).end()
    serving.points.killed("loader.reading")
    assert "SIGKILL" in how
    finish(serving, steady, how)


@pytest.mark.parametrize("name", ["generation.mid_read", "generation.parked", "generation.answered"])
def test_an_update_is_rolled_back_when_the_daemon_is_killed_in_its_load(serving: Any, steady: Any, name: str) -> None:
    epoch = serving.kept.answers().epoch
    serving.points.arm(name)
    how = serving.update(serving.other).end()
    serving.points.killed(name)
    assert how not in ("", "done")
    serving.kept.serves_again(epoch + 1)
    finish(serving, steady, how)


@pytest.mark.parametrize("name", ["fork.became", "core.attached", "core.warmed_up", "core.unserving"])
def test_an_update_is_rolled_back_when_its_core_is_killed_in_its_start(serving: Any, steady: Any, name: str) -> None:
    serving.points.arm(name)
    how = serving.update(serving.other).end()
    serving.points.killed(name)
    assert "rolled back" in how
    assert "SIGKILL" in how
    finish(serving, steady, how)


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("rollout.loaded", "old"),
        ("rollout.core_ready", "old"),
        ("rollout.canary_sung", "old"),
        ("rollout.canary_sung", "new"),
        ("rollout.switched", "old"),
        ("rollout.switched", "new"),
        ("rollout.drained", "old"),
        ("rollout.drained", "new"),
        ("rollout.old_ended", "new"),
        ("rollout.old_ended", "daemon"),
        ("rollout.old_retired", "new"),
    ],
)
def test_an_update_is_completed_although_a_process_is_killed_in_it(
    serving: Any, steady: Any, name: str, victim: str
) -> None:
    (old,) = serving.core_pids()
    epoch = serving.kept.answers().epoch
    serving.points.arm(name, hold=True)
    running = serving.update(serving.other)
    serving.points.fired(name)
    if victim == "daemon":
        serving.kept.kill()
        epoch += 1
    else:
        pids = {old} if victim == "old" else serving.core_pids() - {old}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    serving.points.release(name)
    how = running.end()
    assert how == "done", how
    serving.kept.serves_again(epoch)
    finish(serving, steady, how)


def test_an_update_is_rolled_back_when_its_core_is_killed_before_the_canary(serving: Any, steady: Any) -> None:
    (old,) = serving.core_pids()
    serving.points.arm("rollout.core_ready", hold=True)
    running = serving.update(serving.other)
    serving.points.fired("rollout.core_ready")
    (new,) = serving.core_pids() - {old}
    os.kill(new, signal.SIGKILL)
    serving.points.release("rollout.core_ready")
    how = running.end()
    assert "rolled back" in how
    finish(serving, steady, how)


def test_an_update_is_completed_when_the_old_core_is_killed_as_it_is_told_to_drain(serving: Any, steady: Any) -> None:
    serving.points.arm("core.draining")
    how = serving.update(serving.other).end()
    serving.points.killed("core.draining")
    assert how == "done"
    finish(serving, steady, how)


@pytest.mark.parametrize(
    "name",
    [
        "rollout.begun", "rollout.loaded", "rollout.core_started", "rollout.core_ready", "rollout.switched",
        "rollout.drained", "rollout.old_ended", "rollout.old_retired",
    ],
)  # fmt: skip
def test_a_frontend_that_follows_one_killed_in_an_update_finds_everything_in_order(
    serving: Any, make_clients: Callable[[], Any], clients: Any, name: str
) -> None:
    serving.points.arm(name)
    assert serving.update(serving.other).end() == ""
    serving.points.killed(name)
    serving.frontend.wait(60)
    serving.points.until(lambda: str(serving.core_pids() or ""))
    serving.start()
    serving.settled()
    after = make_clients()
    after.learn()
    assert after.allowed == clients.allowed
