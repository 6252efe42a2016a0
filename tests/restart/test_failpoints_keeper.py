"""The keeper is killed at every one of its failpoints: the daemon goes on, and parks again with the next keeper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from preload.engine.client.control import make_selector
from preload.engine.recipe import Recipe

RAW = Recipe(model="raw")


@dataclass
class Scene:
    """A kept daemon whose generation `resident` is in use."""

    kept: Any
    resident: Any
    attached: Any
    weights: Any

    def events(self, num: int) -> list[str]:
        return [next(self.attached.lease.events()).kind for _ in range(num)]

    def check(self) -> None:
        """With whatever keeper there is now: everything is parked, and comes back when the daemon is killed."""
        self.kept.settled(num_leases=1)
        before = self.kept.states()
        epoch = self.kept.answers().epoch
        self.kept.kill()
        self.kept.serves_again(epoch + 1)
        assert self.kept.states() == before
        self.kept.settled(num_leases=1)
        assert self.resident.is_in(self.attached)
        with self.kept.attach(self.resident):
            pass
        self.let_go()
        self.kept.settled(num_leases=0)
        self.kept.end()

    def let_go(self) -> None:
        """Of the lease: memory of a holder is leased as long as anything refers to it."""
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.close()


@pytest.fixture
def scene(kept: Any, make_weights: Callable[[str], Any]) -> Iterator[Scene]:
    resident, weights = make_weights("resident"), make_weights("raw")
    kept.weights += [resident, weights]
    kept.under.load(resident.path, model="raw")
    made = Scene(kept, resident, kept.attach(resident), weights)
    kept.settled(num_leases=1)
    yield made
    made.let_go()


@pytest.mark.parametrize(("name", "skip"), [("keeper.storing", 0), ("keeper.storing", 1), ("keeper.stored", 1)])
def test_a_load_goes_on_when_the_keeper_is_killed_while_it_is_given_descriptors(
    scene: Scene, name: str, skip: int
) -> None:
    scene.kept.points.arm(name, skip=skip)
    scene.kept.under.load(scene.weights.path, model="raw")
    scene.kept.points.killed(name)
    with scene.kept.attach(scene.weights):
        pass
    scene.kept.under.start()
    scene.check()


@pytest.mark.parametrize("name", ["keeper.removing", "keeper.removed"])
def test_an_eviction_goes_on_when_the_keeper_is_killed_while_it_lets_go(scene: Scene, name: str) -> None:
    scene.kept.under.load(scene.weights.path, model="raw")
    scene.kept.settled(num_leases=1)
    scene.kept.points.arm(name)
    with scene.kept.under.control() as control:
        assert control.evict(make_selector(scene.weights.path, recipe=RAW)).freed
    scene.kept.points.killed(name)
    scene.kept.under.start()
    scene.check()


def test_a_daemon_whose_keeper_is_killed_just_after_its_start_has_everything(scene: Scene) -> None:
    scene.kept.points.arm("keeper.daemon_started")
    scene.kept.kill()
    scene.kept.points.killed("keeper.daemon_started")
    scene.kept.serves_again(2)
    scene.kept.under.start()
    scene.check()


def test_a_fork_of_the_keeper_that_is_killed_before_it_is_a_daemon_is_replaced(scene: Scene) -> None:
    scene.kept.points.arm("keeper.daemon_forked")
    scene.kept.kill()
    scene.kept.points.killed("keeper.daemon_forked")
    scene.kept.serves_again(2)
    assert scene.events(2) == ["lost", "reclaimed"]
    scene.check()


@pytest.mark.parametrize("name", ["keeper.adopting", "keeper.adopted"])
def test_a_daemon_is_adopted_by_the_keeper_after_one_that_is_killed_at_it(scene: Scene, name: str) -> None:
    scene.kept.under.kill()
    scene.kept.points.arm(name)
    scene.kept.under.start(wait=False)
    scene.kept.points.killed(name)
    scene.kept.under.start()
    scene.check()


@pytest.mark.by_descriptor
@pytest.mark.parametrize("name", ["keeper.daemon_died", "keeper.daemon_buried"])
def test_weights_that_lost_daemon_and_keeper_are_gone_but_for_those_who_map_them(scene: Scene, name: str) -> None:
    scene.kept.points.arm(name)
    scene.kept.kill()
    scene.kept.points.killed(name)
    assert scene.resident.is_in(scene.attached)
    scene.kept.under.start()
    assert scene.events(2) == ["lost", "refused"]
    scene.kept.settled(num_leases=0)
    assert scene.kept.states() == {}
    scene.kept.under.load(scene.resident.path, model="raw")
    assert scene.events(1) == ["reclaimed"]
    scene.check()
