"""Fixtures of the engine's tests, from the modules in tests/fakes."""

from __future__ import annotations

import importlib.util
import sys
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


_loader_side = _load_fake("loader_side")
loader = _loader_side.loader
tiny_config = _loader_side.tiny_config
tiny_weights = _loader_side.tiny_weights
write_llama = _loader_side.write_llama
gguf_bytes = _loader_side.gguf_bytes
write_gguf = _loader_side.write_gguf

_frontend_side = _load_fake("frontend_side")
prepare_frontend = _frontend_side.prepare_frontend
wait_for_session = _frontend_side.wait_for_session
start_frontend = _frontend_side.start_frontend
frontend = _frontend_side.frontend

_core_side = _load_fake("core_side")
tiny_model = _core_side.tiny_model
tiny = _core_side.tiny
few_threads = _core_side.few_threads
make_core = _core_side.make_core_fixture
make_request = _core_side.make_request_fixture
run_core = _core_side.run_core_fixture
demo_weights = _core_side.demo_weights

_template_side = _load_fake("template_side")
new_template = _template_side.new_template
template = _template_side.template
start_template = _template_side.start_template

simulate = pytest.fixture(scope="session")(lambda: _load_fake("scheduler_simulator").simulate)

_graph_recorder = _load_fake("graph_recorder")
recorder = pytest.fixture(lambda: _graph_recorder.FakeRecorder())

_strict_device = _load_fake("strict_device")
gpu_of_the_host = _strict_device.gpu_of_the_host
load_strict = pytest.fixture(scope="session")(lambda: _strict_device)
