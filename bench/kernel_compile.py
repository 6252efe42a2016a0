"""Compiles what kernels launch, for GPUs that are not there: launches are recorded, not made.

Needs the package triton, which brings the assembler; no driver. A kernel that asks for more shared memory than its
target has counts as failed, as it would at its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime.errors import PTXASError

TARGETS = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory a block may ask for. Source: CUDA C++ Programming Guide, table of compute capabilities."""

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One specialization of one kernel."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self, capability: int) -> int:
        """Bytes of the cubin. Raises whatever the compiler raises, and AssertionError on too much shared memory."""
        attributes = {(i,): [["tt.divisibility", 16]] for i in self.aligned}
        source = ASTSource(self.kernel, dict(self.signature), dict(self.constants), attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))
        if compiled.metadata.shared > SHARED_BYTES[capability]:
            raise AssertionError(
                f"{self.name} needs {compiled.metadata.shared} bytes of shared memory; "
                f"sm_{capability} has {SHARED_BYTES[capability]}"
            )
        return len(compiled.asm["cubin"])

    def try_compile(self, capability: int) -> str:
        """What the compiler or its assembler has against it, in a line; empty if nothing."""
        try:
            self.compile(capability)
        except (CompilationError, PTXASError, RuntimeError, AssertionError) as error:
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[-1] if lines else ''}"
        return ""


def record(run: Callable[[], object]) -> list[Launch]:
    """What `run` launches, each specialization once. Outputs of the kernels stay as they were."""
    launches: dict[Launch, None] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches[_launch(kernel, args, named)] = None

    with mock.patch.object(triton.JITFunction, "run", note):
        run()
    return list(launches)


def _launch(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    options = tuple((key, named.pop(key)) for key in OPTIONS if key in named)
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    signature, constants, aligned = [], [], []
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        special = isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            kind = "constexpr"
            constants.append((parameter.name, value))
        else:
            kind = _type_of(value)
            if kind.startswith("*") or (special and value % 16 == 0):
                aligned.append(i)
        signature.append((parameter.name, kind))
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), options)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if value < 1 << 31 else "i64"


@contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Compiled kernels go to this folder, not to the user's."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield
