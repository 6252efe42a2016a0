"""Fixtures of the restart tests, from the modules in tests/fakes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes"


def _load_fake(name: str) -> Any:
    """The module tests/fakes/<name>.py: the tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(f"fakes_{name}", FAKES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def load_fake() -> Callable[[str], Any]:
    return _load_fake


@pytest.fixture(scope="module")
def box(wait_for: Callable[..., Any]) -> Iterator[Any]:
    """A systemd that the tests of a module share."""
    with _load_fake("systemd_box").boot(wait_for) as made:
        yield made


_loader_side = _load_fake("loader_side")
tiny_config = _loader_side.tiny_config
tiny_weights = _loader_side.tiny_weights
write_llama = _loader_side.write_llama

_failpoint_side = _load_fake("failpoint_side")
points = _failpoint_side.points
make_weights = _failpoint_side.make_weights
kept = _failpoint_side.kept
unkept = _failpoint_side.unkept
make_kept = _failpoint_side.make_kept

_service_side = _load_fake("service_side")
service = _service_side.service
make_clients = _service_side.make_clients
clients = _service_side.clients
