"""Every GPU kernel compiles to machine code for every target, in each layout and variant of it, without a GPU.

Of what a case launches, one specialization of each kernel, layout and way of multiplying is compiled here: in
bfloat16 for every target, in float32 for one. `make kernels` compiles all of them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from preload.bench.kernel_cases import CASES
from preload.bench.kernel_compile import TARGETS, Launch, cache_in, record

_VARIANTS = ("LAYOUT", "NATIVE", "NOISE")


def chosen() -> list[tuple[str, Launch, int]]:
    """(name, launch, target)"""
    found: dict[str, tuple[str, Launch, int]] = {}
    for case in CASES:
        for dtype in case.dtypes:
            targets = (90,) if dtype == torch.float32 and len(case.dtypes) > 1 else TARGETS
            for launch in record(partial(case.run, dtype)):
                variant = [str(value) for key, value in launch.constants if key in _VARIANTS]
                words = [launch.name, *variant, str(dtype).removeprefix("torch.")]
                for target in targets:
                    name = "-".join((*words, f"sm_{target}"))
                    if target >= case.min_capability:
                        found.setdefault(name, (name, launch, target))
    return list(found.values())


PARAMETERS = [pytest.param(launch, target, id=name) for name, launch, target in chosen()]


@pytest.mark.parametrize(("launch", "target"), PARAMETERS)
def test_kernels_compile_for_every_target(launch: Launch, target: int, tmp_path: Path) -> None:
    with cache_in(str(tmp_path)):
        assert launch.compile(target) > 0


def test_every_kernel_of_the_package_is_among_them() -> None:
    from preload.engine.kernels.triton import attention, elementwise, moe, products, sampling, scatter

    modules = (attention, elementwise, moe, products, sampling, scatter)
    written = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {parameter.values[0].name for parameter in PARAMETERS} == written
