"""The daemon is killed at every one of its failpoints, and its keeper starts another: see tests/fakes/failpoints.py.

In every case a witness holds a lease on other weights: it must never notice more than a lost and reclaimed lease. At
the end nothing may be left: no process, no descriptor, no byte in the books.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client.control import make_selector
from preload.engine.errors import CheckpointError, DaemonUnreachableError, NotResidentError
from preload.engine.recipe import Recipe

RAW = Recipe(model="raw")


def failpoints() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "fakes" / "failpoints.py"
    spec = importlib.util.spec_from_file_location("fakes_failpoints", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.FAILPOINTS
    return found


@pytest.mark.parametrize("name", failpoints())
def test_a_failpoint_lies_at_a_function_that_exists_and_some_test_arms_it(name: str) -> None:
    failpoints()[name].check()
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_failpoints*.py"))
    assert f'"{name}"' in tests


@dataclass
class Scene:
    """A kept daemon with two generations: `weights`, and the witness's, which `witnessed` has a lease on."""

    kept: Any
    witness: Any
    witnessed: Any
    weights: Any
    others: Callable[[str], Any]

    def try_to_load(self, weights: Any) -> None:
        """A daemon that dies meanwhile is all that may go wrong."""
        with contextlib.suppress(DaemonUnreachableError):
            self.kept.under.load(weights.path, model="raw")

    def try_to_evict(self, weights: Any) -> None:
        with contextlib.suppress(DaemonUnreachableError), self.kept.under.control() as control:
            control.evict(make_selector(weights.path, recipe=RAW))

    def is_resident(self, weights: Any) -> bool:
        return bool(self.kept.states().get(weights.path.name) == "READY")

    def check(self, epoch: int = 2) -> None:
        """Whatever happened: the witness is undisturbed, and `weights` can be had and let go of."""
        self.kept.serves_again(epoch)
        if not self.is_resident(self.weights):
            self.kept.under.load(self.weights.path, model="raw")
        with self.kept.attach(self.weights):
            self.kept.settled(num_leases=2)
        self.kept.settled(num_leases=1)
        self.try_to_evict(self.weights)
        self.kept.settled(num_leases=1)
        assert self.weights.path.name not in self.kept.states()
        assert self.witness.is_in(self.witnessed)
        events = []
        while not events or events[-1][0] != "reclaimed" or int(events[-1][1]) < epoch:
            event = next(self.witnessed.lease.events())
            events.append((event.kind, event.detail))
        assert [kind for kind, _ in events] == ["lost", "reclaimed"] * (len(events) // 2)
        with self.kept.attach(self.witness, by_id=self.witnessed.generation_id):
            pass
        self.let_go()
        self.kept.settled(num_leases=0)
        self.kept.end()

    def let_go(self) -> None:
        """Of the witness's lease: memory of a holder is leased as long as anything refers to it."""
        witnessed, self.witnessed = self.witnessed, None
        if witnessed is not None:
            witnessed.close()


@pytest.fixture
def scene(kept: Any, make_weights: Callable[[str], Any]) -> Iterator[Scene]:
    witness, weights = make_weights("witness"), make_weights("raw")
    kept.weights += [witness, weights]
    kept.under.load(witness.path, model="raw")
    made = Scene(kept, witness, kept.attach(witness), weights, make_weights)
    yield made
    made.let_go()


LOADING = {
    "generation.loading_begun": 0, "generation.loader_started": 0, "generation.plan_received": 0,
    "generation.reserved": 0, "generation.allocated": 0, "generation.granted": 1, "generation.mid_read": 0,
    "generation.committed_heard": 0, "generation.loader_exited": 0, "generation.unsealed": 0, "generation.sealed": 0,
    "generation.unparked": 0, "generation.manifest_parked": 0, "generation.parked": 0, "catalog.unsaved": 0,
    "catalog.body_written": 0,
}  # fmt: skip
"""Failpoints of a load up to its commit, and how many calls of their functions come before the one that counts."""
SEALING = pytest.mark.host_only


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SEALING) if "sealed" in name else name for name in LOADING]
)
def test_a_daemon_killed_in_a_load_comes_back_without_it(scene: Scene, name: str) -> None:
    scene.kept.points.arm(name, skip=LOADING[name])
    scene.try_to_load(scene.weights)
    scene.kept.points.killed(name)
    scene.kept.serves_again(2)
    assert scene.weights.path.name not in scene.kept.states()
    scene.check()


@pytest.mark.parametrize("name", ["catalog.saved", "generation.ready", "generation.answered"])
def test_a_daemon_killed_after_a_commit_comes_back_with_it_and_reads_nothing(scene: Scene, name: str) -> None:
    scene.kept.points.arm(name)
    scene.try_to_load(scene.weights)
    scene.kept.points.killed(name)
    scene.kept.serves_again(2)
    assert scene.is_resident(scene.weights)
    away = scene.weights.path.rename(scene.weights.path.with_suffix(".away"))
    (generation,) = [g for g in scene.kept.under.generations() if g.checkpoint_paths[0] == str(scene.weights.path)]
    with scene.kept.attach(scene.weights, by_id=generation.id):
        pass
    away.rename(scene.weights.path)
    scene.check()


@pytest.mark.parametrize("name", ["fail.begun", "fail.done"])
def test_a_daemon_killed_while_a_load_fails_remembers_nothing_of_it(scene: Scene, name: str) -> None:
    broken = scene.others("broken")
    whole = broken.path.read_bytes()
    broken.path.write_bytes(whole[:-10])
    scene.kept.points.arm(name)
    scene.try_to_load(broken)
    scene.kept.points.killed(name)
    scene.kept.serves_again(2)
    assert broken.path.name not in scene.kept.states()
    with pytest.raises(CheckpointError):
        scene.kept.under.load(broken.path, model="raw")
    scene.kept.settled(num_leases=1)
    scene.check()


RETIRING = {
    "retire.begun": "READY",
    "catalog.unsaved": "READY",
    "catalog.saved": "RETIRING",
    "retire.ended": "RETIRING",
}


@pytest.mark.parametrize("name", RETIRING)
def test_a_generation_in_use_is_ready_or_retiring_whenever_the_daemon_is_killed(scene: Scene, name: str) -> None:
    scene.kept.under.load(scene.weights.path, model="raw")
    with scene.kept.attach(scene.weights) as used:
        scene.kept.points.arm(name)
        scene.try_to_evict(scene.weights)
        scene.kept.points.killed(name)
        scene.kept.serves_again(2)
        assert scene.kept.states()[scene.weights.path.name] == RETIRING[name]
        scene.kept.settled(num_leases=2)
        assert scene.weights.is_in(used)
    del used  # memory of a holder is leased as long as anything refers to it
    scene.check()


FREEING = {
    "free.begun": 0, "catalog.unsaved": 1, "catalog.saved": 1, "free.manifest_forgotten": 0, "free.unparked": 0,
    "free.done": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", FREEING)
def test_a_generation_that_was_being_freed_is_freed_by_the_next_daemon(scene: Scene, name: str) -> None:
    scene.kept.under.load(scene.weights.path, model="raw")
    scene.kept.points.arm(name, skip=FREEING[name])
    scene.try_to_evict(scene.weights)
    scene.kept.points.killed(name)
    scene.kept.serves_again(2)
    scene.kept.settled(num_leases=1)
    assert scene.weights.path.name not in scene.kept.states()
    scene.check()


HANDED_OVER = ("handover.asked", "handover.redeemed", "handover.sent")


@pytest.mark.parametrize(
    "name",
    [
        "attach.resolved", "attach.granted", "catalog.unsaved", "catalog.body_written", "catalog.saved",
        "attach.answered", *(pytest.param(name, marks=pytest.mark.by_descriptor) for name in HANDED_OVER),
    ],
)  # fmt: skip
def test_an_engine_attaches_although_the_daemon_is_killed_in_the_middle_of_it(scene: Scene, name: str) -> None:
    scene.kept.under.load(scene.weights.path, model="raw")
    scene.kept.points.arm(name)
    with scene.kept.attach(scene.weights) as attached:
        scene.kept.points.killed(name)
        scene.kept.settled(num_leases=2)
        assert scene.weights.is_in(attached)
    del attached
    scene.check()


@pytest.mark.parametrize("name", ["lease.ending", "catalog.unsaved", "catalog.saved", "lease.ended"])
def test_a_lease_that_was_ending_ends_in_the_next_life_of_the_daemon(scene: Scene, name: str) -> None:
    scene.kept.under.load(scene.weights.path, model="raw")
    with scene.kept.attach(scene.weights):
        scene.kept.points.arm(name)
    scene.kept.points.killed(name)
    scene.kept.serves_again(2)
    scene.kept.settled(num_leases=1)
    scene.check()


@pytest.mark.parametrize("name", ["reclaim.claimed", "attach.answered"])
def test_a_lease_is_reclaimed_although_the_daemon_is_killed_again_meanwhile(scene: Scene, name: str) -> None:
    scene.kept.points.arm(name)
    scene.kept.kill()
    scene.kept.points.killed(name)
    scene.check(epoch=3)


RESTORING = {
    "restore.catalog_read": 0, "restore.revived": 1, "catalog.body_written": 2, "restore.begun_anew": 0,
    "restore.unready": 0, "restore.ready": 0,
}  # fmt: skip
"""The body of a catalog is digested twice when its two headers are read."""


@pytest.mark.parametrize("name", RESTORING)
def test_what_was_parked_is_restored_by_the_one_after_a_daemon_that_is_killed_at_it(scene: Scene, name: str) -> None:
    scene.kept.under.load(scene.weights.path, model="raw")
    scene.kept.settled(num_leases=1)
    scene.kept.points.arm(name, skip=RESTORING[name])
    scene.kept.kill()
    scene.kept.points.killed(name)
    scene.kept.serves_again(2)
    assert scene.is_resident(scene.weights)
    scene.check(epoch=2)


def test_a_daemon_without_a_keeper_that_is_killed_leaves_nothing(make_daemon: Any, make_weights: Any) -> None:
    daemon, weights = make_daemon(), make_weights("raw")
    daemon.load(weights.path, model="raw")
    daemon.kill()
    daemon.start()
    with pytest.raises(NotResidentError):
        daemon.control().check(make_selector(weights.path, recipe=RAW))
