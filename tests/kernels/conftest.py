"""Compiled kernels for the tests: one build per set of flags, cached like a daemon's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.kernels.native.build import COMPILERS, find_or_build
from preload.engine.kernels.native.library import NativeLibrary

# They run in processes of their own, which test_triton_interpreter.py starts.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]

VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "native": ((), ("integers", "tiles")),
    "bfloat16": ((), ("integers", "tiles", "bfloat16")),
    "bfloat16 without AMX": ((), ("integers", "bfloat16")),
    "without AMX": ((), ("integers",)),
    "without integers": ((), ()),
    "without AVX-512": (("-mno-avx512f",), ()),
}
"""Flags of the compiler, and units of the CPU that may be used where it has them."""


@pytest.fixture(scope="session")
def open_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], NativeLibrary]:
    """(variant, number of threads) → the library. Skips where nothing can compile it."""
    cache: Path = tmp_path_factory.mktemp("kernels")
    opened: dict[tuple[str, int], NativeLibrary] = {}

    def open_once(variant: str, num_threads: int) -> NativeLibrary:
        if not any(map(shutil.which, COMPILERS)):
            pytest.skip("no C++ compiler")
        key = (variant, num_threads)
        if key not in opened:
            flags, units = VARIANTS[variant]
            opened[key] = NativeLibrary(find_or_build(cache, flags), num_threads, units)
        return opened[key]

    return open_once


def _core_side() -> Any:
    """tests/fakes/core_side.py: the tests are no package, so it is loaded by its path."""
    path = Path(__file__).parents[1] / "fakes" / "core_side.py"
    spec = importlib.util.spec_from_file_location("fakes_core_side_of_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_fakes = _core_side()
demo_weights = _fakes.demo_weights
make_request = _fakes.make_request_fixture
run_core = _fakes.run_core_fixture
