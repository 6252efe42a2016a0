"""Every GPU kernel, on every kind of input and dtype, compiles to machine code for every target, without a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

from preload.bench.kernel_cases import CASES, Case
from preload.bench.kernel_compile import TARGETS, cache_in, record


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_compile_for_every_target(case: Case, target: int, tmp_path: Path) -> None:
    if target < case.min_capability:
        pytest.skip(f"needs compute capability {case.min_capability / 10}")
    with cache_in(str(tmp_path)):
        for dtype in case.dtypes:
            for launch in record(partial(case.run, dtype)):
                launch.compile(target)
