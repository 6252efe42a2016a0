"""One case of each GPU kernel compiles to machine code without a GPU; the whole matrix: test_triton_matrix.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from preload.bench.kernel_cases import CASES
from preload.bench.kernel_compile import Launch, cache_in, record

CHOSEN = (
    "attention, mixed, 2/2 of 256",
    "KV write by slot",
    "RMSNorm, with and without residual",
    "rotary",
    "SwiGLU",
    "product, nvfp4",
    "e4m3 × e4m3, fp8_per_block",
    "mixture of experts, mxfp4",
    "mixture of experts, dense float32 in bfloat16",
    "sampling",
    "staged scatter",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    with cache_in(str(tmp_path)):
        yield


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels_compile_for_hopper(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    launches = record(partial(case.run, case.dtypes[-1]))
    assert launches
    assert {launch.name: launch.try_compile(90) for launch in launches} == {launch.name: "" for launch in launches}


def test_what_a_target_cannot_do_is_said() -> None:
    case = next(case for case in CASES if case.name == "e4m3 × e4m3, fp8_per_block")
    launch = record(partial(case.run, torch.bfloat16))[0]
    assert launch.try_compile(80) != ""


def test_too_much_shared_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from preload.bench import kernel_compile

    case = next(case for case in CASES if case.name == "attention, mixed, 2/2 of 256")
    launch: Launch = record(partial(case.run, torch.float32))[0]
    monkeypatch.setitem(kernel_compile.SHARED_BYTES, 90, 1000)
    assert "bytes of shared memory; sm_90 has 1000" in launch.try_compile(90)
