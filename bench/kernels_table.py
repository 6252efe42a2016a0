"""The table of GPU kernels, on a machine without a GPU: what compiles for which target, and the error of each.

    python -m preload.bench.kernels_table [--only TEXT] [--workers N] [--cache FOLDER]        (make kernels)

One line for each kernel, kind of input and dtype: the maximal error against its torch reference in Triton's
interpreter, relative to the largest magnitude; and for each target the number of specializations compiled to cubin.
Exit code 1 if one does not compile or errs by more than its tolerance. The interpreter runs in a process of its own,
since a process interprets kernels from its start or not at all; compilers run in worker processes, and what they
compiled is kept in the cache: another run compiles what has changed. All of them end with the process that prints
the table, also when that is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from preload.engine.core.process import die_with_parent

from .processes import clean_up_when_terminated

if TYPE_CHECKING:
    import torch

    from preload.bench.kernel_cases import Case
    from preload.bench.kernel_compile import Launch

CACHE = Path("build/kernels")

Job = tuple[int, int, int, int]
"""(number of the case, of its dtype, and of the launch among its launches; target)"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m preload.bench.kernels_table", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--errors", action="store_true", help="print the errors as JSON; needs TRITON_INTERPRET=1")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of compiled kernels (default: {CACHE})")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.errors:
        if options.parent:
            _end_with(options.parent)
        return print_errors(options.only)
    clean_up_when_terminated()
    try:
        return print_table(options.only, options.workers, options.cache)
    except KeyboardInterrupt:
        return 130


def print_errors(only: str) -> int:
    """One JSON object per case and dtype, as the interpreting process writes them."""
    import torch

    from preload.bench import interpreter
    from preload.bench.kernel_cases import maximal_error

    torch.set_num_threads(1)
    interpreter.repair()
    for _, case, _, dtype in selected(only):
        print(json.dumps(maximal_error(case.run(dtype))), flush=True)
    return 0


def print_table(only: str, num_workers: int, folder: Path) -> int:
    from preload.bench.kernel_cases import TOLERANCES
    from preload.bench.kernel_compile import TARGETS

    rows = list(selected(only))
    width = max(len(case.name) for _, case, _, _ in rows)
    failures: list[str] = []
    with compilers(num_workers, folder) as pool, contextlib.closing(interpreted_errors(only)) as errors:
        compilation = Compilation(pool, rows)
        print(f"{'kernel':{width}} {'dtype':8} {'error':>8}  " + "  ".join(f"sm_{target}" for target in TARGETS))
        for (case_no, case, dtype_no, dtype), error in zip(rows, errors, strict=True):
            cells = [compilation.cell(case_no, dtype_no, target, failures) for target in TARGETS]
            name = str(dtype).removeprefix("torch.")
            if error > TOLERANCES[dtype]:
                failures.append(f"{case.name}, {name}: error {error:.1e} above {TOLERANCES[dtype]:.1e}")
            print(f"{case.name:{width}} {name:8} {error:8.1e}  " + "  ".join(f"{c:>5}" for c in cells), flush=True)
    print(compilation.summary() + "; error of the largest magnitude of each result")
    print("\n".join(failures) if failures else "every kernel compiles, and is within its tolerance")
    return 1 if failures else 0


class Compilation:
    """Every specialization of some rows, compiled once for each target, whichever rows launch it."""

    def __init__(self, pool: ProcessPoolExecutor, rows: Sequence[tuple[int, Case, int, torch.dtype]]) -> None:
        from preload.bench.kernel_compile import TARGETS

        self._found: dict[tuple[Launch, int], Future[str]] = {}
        for case_no, case, dtype_no, _ in rows:
            for launch_no, launch in enumerate(launches(case_no, dtype_no)):
                for target in TARGETS:
                    if target >= case.min_capability and (launch, target) not in self._found:
                        job = case_no, dtype_no, launch_no, target
                        self._found[launch, target] = pool.submit(compile_job, job)

    def cell(self, case_no: int, dtype_no: int, target: int, failures: list[str]) -> str:
        """How many specializations of a row compile for a target; what does not is told once."""
        from preload.bench.kernel_cases import CASES

        if target < CASES[case_no].min_capability:
            return "–"
        found = [(launch, self._found[launch, target].result()) for launch in launches(case_no, dtype_no)]
        for launch, why in found:
            text = f"{launch.name} for sm_{target} ({CASES[case_no].name}): {why}"
            if why and text not in failures:
                failures.append(text)
        good = sum(not why for _, why in found)
        return str(good) if good == len(found) else f"{good}/{len(found)}"

    def summary(self) -> str:
        return f"{len({launch.name for launch, _ in self._found})} kernels, {len(self._found)} cubins"


@cache
def launches(case_no: int, dtype_no: int) -> Sequence[Launch]:
    """What a case launches, in an order that every process finds alike."""
    from preload.bench.kernel_cases import CASES
    from preload.bench.kernel_compile import record

    case = CASES[case_no]
    return record(partial(case.run, case.dtypes[dtype_no]))


def compile_job(job: Job) -> str:
    """In a worker: what the compiler has against it; empty if nothing."""
    case_no, dtype_no, launch_no, target = job
    return launches(case_no, dtype_no)[launch_no].try_compile(target)


@contextlib.contextmanager
def compilers(num_workers: int, folder: Path) -> Iterator[ProcessPoolExecutor]:
    """Processes that compile into a folder. If anything goes wrong here, they do not finish what they have begun."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(str(folder), os.getpid()))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown()


def _begin(folder: str, parent_pid: int) -> None:
    """In a worker, before its first job."""
    _end_with(parent_pid)
    import torch
    import triton

    torch.set_num_threads(1)
    triton.knobs.cache.dir = str(Path(folder).absolute())


def _end_with(parent_pid: int) -> None:
    """In a process that works for the table: it ends with it, and an interrupt is the table's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)


def selected(only: str) -> Iterator[tuple[int, Case, int, torch.dtype]]:
    """(number, case, number of the dtype, dtype) of each row."""
    from preload.bench.kernel_cases import CASES

    for case_no, case in enumerate(CASES):
        if only in case.name:
            yield from ((case_no, case, dtype_no, dtype) for dtype_no, dtype in enumerate(case.dtypes))


def interpreted_errors(only: str) -> Generator[float, None, None]:
    """Errors in the order of `selected`, as a child computes them. Raises RuntimeError if it fails."""
    command = [sys.executable, "-P", "-m", "preload.bench.kernels_table", "--errors", "--only", only]
    command += ["--parent", str(os.getpid())]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                yield json.loads(line)
        except BaseException:  # nobody reads the rest
            child.kill()
            raise
    if child.returncode:
        raise RuntimeError(f"the interpreting process failed with exit code {child.returncode}")


if __name__ == "__main__":
    raise SystemExit(main())
