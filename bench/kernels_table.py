"""The table of GPU kernels, on a machine without a GPU: what compiles for which target, and the error of each.

    python -m preload.bench.kernels_table [--only TEXT]        (make kernels)

One line for each kernel, kind of input and dtype: the maximal error against its torch reference in Triton's
interpreter, relative to the largest magnitude; and for each target the number of specializations compiled to cubin.
Exit code 1 if one does not compile or errs by more than its tolerance. The interpreter runs in a process of its own,
since a process interprets kernels from its start or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from preload.bench.kernel_cases import Case
    from preload.bench.kernel_compile import Launch


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m preload.bench.kernels_table", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--errors", action="store_true", help="print the errors as JSON; needs TRITON_INTERPRET=1")
    options = parser.parse_args(argv)
    return print_errors(options.only) if options.errors else print_table(options.only)


def print_errors(only: str) -> int:
    """One JSON object per case and dtype, as the interpreting process writes them."""
    from preload.bench import interpreter
    from preload.bench.kernel_cases import maximal_error

    interpreter.repair()
    for case, dtype in selected(only):
        print(json.dumps(maximal_error(case.run(dtype))), flush=True)
    return 0


def print_table(only: str) -> int:
    from preload.bench.kernel_cases import TOLERANCES
    from preload.bench.kernel_compile import TARGETS, cache_in, record

    cases = list(selected(only))
    width = max(len(case.name) for case, _ in cases)
    print(f"{'kernel':{width}} {'dtype':8} {'error':>8}  " + "  ".join(f"sm_{target}" for target in TARGETS))
    failures: list[str] = []
    compiled: dict[tuple[Launch, int], str] = {}
    errors = interpreted_errors(only)
    with tempfile.TemporaryDirectory(prefix="preload-kernels-") as folder, cache_in(folder):
        for case, dtype in cases:
            launches = record(partial(case.run, dtype))
            cells = [_compile(case, launches, target, compiled, failures) for target in TARGETS]
            error, name = next(errors), str(dtype).removeprefix("torch.")
            if error > TOLERANCES[dtype]:
                failures.append(f"{case.name}, {name}: error {error:.1e} above {TOLERANCES[dtype]:.1e}")
            print(f"{case.name:{width}} {name:8} {error:8.1e}  " + "  ".join(f"{c:>5}" for c in cells), flush=True)
    kernels = {launch.name for launch, _ in compiled}
    print(f"{len(kernels)} kernels, {len(compiled)} cubins; error of the largest magnitude of each result")
    print("\n".join(failures) if failures else "every kernel compiles, and is within its tolerance")
    return 1 if failures else 0


def selected(only: str) -> Iterator[tuple[Case, torch.dtype]]:
    from preload.bench.kernel_cases import CASES

    return ((case, dtype) for case in CASES if only in case.name for dtype in case.dtypes)


def interpreted_errors(only: str) -> Iterator[float]:
    """Errors in the order of `selected`, as a child computes them. Raises RuntimeError if it fails."""
    command = [sys.executable, "-P", "-m", "preload.bench.kernels_table", "--errors", "--only", only]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise RuntimeError(f"the interpreting process failed with exit code {child.returncode}")


def _compile(
    case: Case, launches: Sequence[Launch], target: int, compiled: dict[tuple[Launch, int], str], failures: list[str]
) -> str:
    """How many specializations compile for a target; a case's kernels are compiled once, whoever else uses them."""
    if target < case.min_capability:
        return "–"
    for launch in launches:
        if (launch, target) not in compiled:
            compiled[launch, target] = launch.try_compile(target)
            if compiled[launch, target]:
                failures.append(f"{launch.name} for sm_{target} ({case.name}): {compiled[launch, target]}")
    good = sum(not compiled[launch, target] for launch in launches)
    return str(good) if good == len(launches) else f"{good}/{len(launches)}"


if __name__ == "__main__":
    raise SystemExit(main())
