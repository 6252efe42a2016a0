"""Fixtures of the fuzzers: an attack's length and seed, and processes to attack."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes"


def _load_fake(name: str) -> Any:
    """The module tests/fakes/<name>.py: the tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(f"fuzz_{name}", FAKES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_fuzzing = _load_fake("fuzzing")

_loader_side = _load_fake("loader_side")
tiny_config = _loader_side.tiny_config
tiny_weights = _loader_side.tiny_weights
write_llama = _loader_side.write_llama

_frontend_side = _load_fake("frontend_side")
prepare_frontend = _frontend_side.prepare_frontend
wait_for_session = _frontend_side.wait_for_session
start_frontend = _frontend_side.start_frontend

_template_side = _load_fake("template_side")
new_template = _template_side.new_template
template = _template_side.template

_reports: list[str] = []


@pytest.fixture
def fuzzing() -> Any:
    """The module of moves."""
    return _fuzzing


@pytest.fixture
def fuzzer(request: pytest.FixtureRequest, wait_for: Callable[..., Any]) -> Any:
    seconds = request.config.getoption("--fuzz-seconds")
    seed = request.config.getoption("--fuzz-seed") or random.SystemRandom().randrange(1, 1 << 32)
    request.node.add_marker(pytest.mark.timeout(300 + seconds))
    return _fuzzing.Fuzzer(seconds, seed, wait_for, _reports)


@pytest.fixture
def attack(fuzzer: Any, fuzzing: Any) -> Callable[..., None]:
    """attack(name, process, log, good, door), where a door has `moves`, and `close` lets go of what they hold."""

    def run(name: str, process: Any, log: Callable[[], str], good: Callable[[], None], door: Any) -> None:
        with contextlib.closing(door):
            fuzzer.attack(fuzzing.Target(name, process, log, good, door.close), door.moves)

    return run


@pytest.fixture(scope="session", autouse=True)
def _tell(pytestconfig: pytest.Config) -> Iterator[None]:
    """What was sent, also when nobody looks at the output of tests that pass."""
    yield
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _reports:
        reporter.write_line("")
        for line in _reports:
            reporter.write_line(line)
