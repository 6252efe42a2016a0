"""Every kernel on a real GPU equals its reference there, and a decoder on Triton's operations one on torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from preload.bench.kernel_cases import CASES, TOLERANCES, Case, maximal_error

PARAMETERS = [pytest.param(c, d, id=f"{c.name}, {str(d).removeprefix('torch.')}") for c in CASES for d in c.dtypes]


@pytest.mark.parametrize(("case", "dtype"), PARAMETERS)
def test_kernels_equal_their_references(case: Case, dtype: torch.dtype, gpu: str) -> None:
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < case.min_capability:
        pytest.skip(f"needs compute capability {case.min_capability / 10}")
    with torch.device(gpu):
        results: Any = case.run(dtype)
    # Tensor cores add in another order, and logarithms differ in their last bits.
    assert maximal_error(results) <= 4 * TOLERANCES[dtype] + 1e-5
