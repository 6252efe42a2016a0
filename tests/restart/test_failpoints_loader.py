"""Loaders and attaching engines are killed at every one of their failpoints: the daemon has nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client.control import make_selector
from preload.engine.errors import LoaderDiedError
from preload.engine.recipe import Recipe

FAKES = Path(__file__).parents[1] / "fakes"
RAW = Recipe(model="raw")


@pytest.fixture
def weights(unkept: Any, make_weights: Callable[[str], Any]) -> Iterator[Any]:
    """Not resident. Whatever a test did, they can be had afterwards, and let go of."""
    made = make_weights("raw")
    selector = make_selector(made.path, recipe=RAW)
    yield made
    unkept.settled(num_leases=0)
    unkept.under.load(made.path, model="raw")
    with unkept.attach(made):
        unkept.settled(num_leases=1)
    with unkept.under.control() as control:
        assert list(control.verify(selector))[-1].verified.num_tensors == 3
        control.evict(selector)
    unkept.settled(num_leases=0)
    assert made.path.name not in unkept.states()


@pytest.mark.parametrize(
    "name",
    [
        "loader.job_received", "loader.opened", "loader.planned", "loader.granted", "loader.reading", "loader.read",
        "loader.uncommitted", "loader.committed",
    ],
)  # fmt: skip
def test_a_loader_killed_in_a_load_leaves_a_failed_generation_without_memory(
    unkept: Any, weights: Any, name: str
) -> None:
    unkept.points.arm(name)
    with pytest.raises(LoaderDiedError, match="SIGKILL"):
        unkept.under.load(weights.path, model="raw")
    unkept.points.killed(name)
    assert unkept.states()[weights.path.name] == "FAILED"


@pytest.mark.parametrize("name", ["loader.job_received", "loader.verifying", "loader.verified"])
def test_a_loader_killed_in_a_verification_leaves_the_generation_as_it_was(
    unkept: Any, weights: Any, name: str
) -> None:
    unkept.under.load(weights.path, model="raw")
    unkept.points.arm(name)
    with unkept.under.control() as control, pytest.raises(LoaderDiedError, match="SIGKILL"):
        list(control.verify(make_selector(weights.path, recipe=RAW)))
    unkept.points.killed(name)
    assert unkept.states()[weights.path.name] == "READY"


@pytest.mark.parametrize("name", ["loader.opened", "loader.hashing", "loader.digested"])
def test_a_loader_killed_while_it_hashes_a_touched_file_costs_that_attach_at_most(
    unkept: Any, weights: Any, name: str
) -> None:
    unkept.under.load(weights.path, model="raw")
    os.utime(weights.path)
    unkept.points.arm(name)
    with pytest.raises(LoaderDiedError, match="SIGKILL"), unkept.attach(weights):
        pass
    unkept.points.killed(name)
    assert unkept.states()[weights.path.name] == "READY"


@pytest.mark.parametrize(
    "name",
    [
        "client.attached",
        pytest.param("client.fetched", marks=pytest.mark.by_descriptor),
        "client.mapped",
        "client.unbound",
        "client.bound",
    ],
)
def test_an_engine_killed_while_it_attaches_holds_no_lease(unkept: Any, weights: Any, name: str) -> None:
    unkept.under.load(weights.path, model="raw")
    options = {"runtime_dir": unkept.runtime_dir, "checkpoint": str(weights.path), "recipe": {"model": "raw"}}
    unkept.points.arm(name)
    command = unkept.points.command("client", str(FAKES / "holder.py"), json.dumps({**options, "tensors": "buffers"}))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60)
    unkept.points.killed(name)
    assert (done.returncode, done.stdout) == (-9, b"")
