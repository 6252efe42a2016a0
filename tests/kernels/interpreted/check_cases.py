"""Every kernel against its reference, in Triton's interpreter. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from preload.bench.kernel_cases import CASES, TOLERANCES, Case, maximal_error

EXACT = ("KV write by slot", "activations to e4m3", "uniform numbers", "sampling", "staged scatter")
"""Whatever the dtype, every bit is the reference's."""

PARAMETERS = [pytest.param(c, d, id=f"{c.name}, {str(d).removeprefix('torch.')}") for c in CASES for d in c.dtypes]


@pytest.mark.parametrize(("case", "dtype"), PARAMETERS)
def test_kernels_equal_their_references(case: Case, dtype: torch.dtype) -> None:
    assert maximal_error(case.run(dtype)) <= (0.0 if case.name in EXACT else TOLERANCES[dtype])
