"""Checkpoints that GPTQ or AWQ quantized: their settings, and which stored tensors make up which weight.

A quantized weight `m.weight` [rows, cols] is stored as

    gptq   m.qweight int32[cols/8, rows]   eight columns to a word, the first in its lowest bits
           m.qzeros  int32[groups, rows/8]  zero points, eight rows to a word; less one, unless the format is gptq_v2
           m.scales  float16[groups, rows]
           m.g_idx   int32[cols]            each column's group; may be missing
    awq    m.qweight int32[cols, rows/8]    eight rows to a word, nibbles in the order 0 2 4 6 1 3 5 7
           m.qzeros  int32[groups, rows/8]  likewise
           m.scales  float16[groups, rows]

and means (q − zero) · scale. It becomes int4_group32, 64 or 128 (the largest that divides the group), which holds
that exactly. Settings come from config.json's quantization_config, or from the file older tools wrote beside it.
Sources: the GPTQModel and AutoAWQ packages' formats. Owns no conversion: that is unpack.py's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from preload.engine.errors import CheckpointError, RequestError
from preload.engine.models.llama_names import ExpectedTensor

from .checkpoint import CONFIG_NAME, Checkpoint
from .files import CheckpointFile, TensorInfo, fault
from .resident_parts import resident_parts
from .steps import Packing, Step, Target
from .strict_json import read_object

KEY = "quantization_config"
_OLD_FILES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_MAX_BYTES = 1_000_000


def read_packing(checkpoint: Checkpoint) -> Packing | None:
    """The settings of a GPTQ or AWQ checkpoint; None of any other. Raises CheckpointError for unsupported ones."""
    settings = (checkpoint.config or {}).get(KEY)
    path = checkpoint.config_path
    if settings is None and any(tensor.name.endswith(".qweight") for tensor in checkpoint.tensors):
        settings, path = _old_settings(checkpoint)
    if not isinstance(settings, dict):
        return None  # a configuration with something else there is refused where it is read
    method = settings.get("quant_method")
    if method not in _OLD_FILES:
        return None
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise _unsupported(path, "bits", bits, "4 is; quantize again, or load with model 'raw'")
    group_size = settings.get("group_size", settings.get("q_group_size"))
    if type(group_size) is not int or (group_size != -1 and (group_size < 32 or group_size % 32)):
        raise _unsupported(path, "group_size", group_size, "multiples of 32 and -1 are")
    if method == "awq":
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm" or settings.get("zero_point", True) is not True:
            raise _unsupported(path, "version", settings.get("version"), "GEMM with zero points is")
        return Packing("awq", group_size)
    form = settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported(path, "checkpoint_format", form, "gptq and gptq_v2 are")
    return Packing(str(form), group_size)


def _old_settings(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """From the file of an older tool, which becomes one of the checkpoint's documents."""
    folder = os.path.dirname(checkpoint.config_path)
    for method, name in _OLD_FILES.items():
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            file = CheckpointFile(path)
            settings, data = read_object(file, "quantization settings", _MAX_BYTES)
            checkpoint.documents.append((file, data))
            return {"quant_method": method, **settings}, path
    raise CheckpointError(
        f"{checkpoint.path} holds packed weights (.qweight), but {CONFIG_NAME} has no {KEY}, and there is neither "
        f"{' nor '.join(_OLD_FILES.values())}; fetch the checkpoint again",
        {"file": checkpoint.config_path, "key": KEY},
    )


def _unsupported(path: str, key: str, value: object, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {key}={value!r} of its quantization is not supported; {what}",
                           {"file": path, "key": key})  # fmt: skip


def split_packed(
    tensors: Iterable[TensorInfo], packing: Packing | None
) -> tuple[list[TensorInfo], dict[str, dict[str, TensorInfo]]]:
    """The tensors that are stored plainly, and those of packed weights: by the weight's name, then by suffix."""
    plain: list[TensorInfo] = []
    packed: dict[str, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        module, _, suffix = tensor.name.rpartition(".")
        if packing is None or suffix not in _SUFFIXES:
            plain.append(tensor)
        else:
            packed.setdefault(f"{module}.weight", {})[suffix] = tensor
    return plain, packed


def packed_step(
    name: str, stored: Mapping[str, TensorInfo], expected: ExpectedTensor | None, packing: Packing, quantization: str
) -> Step:
    """What becomes of one packed weight. Raises CheckpointError naming a tensor that does not fit."""
    some = next(iter(stored.values()))
    path = some.file.path
    if quantization != "keep":
        raise RequestError(
            f"{path} is quantized by {packing.method} already; it is loaded with quantization 'keep', not "
            f"{quantization!r}"
        )
    for suffix in ("qweight", "qzeros", "scales"):
        if suffix not in stored:
            raise fault(path, f"has no {suffix} beside it; fetch the checkpoint again", some.name)
    if expected is None:
        raise fault(path, "belongs to a weight that the model has no use for; correct the configuration or the file",
                    some.name)  # fmt: skip
    rows, cols = expected.shape
    group_size = cols if packing.group_size == -1 else packing.group_size
    if cols % group_size or cols % 32 or rows % 8:
        raise fault(path, f"is packed, and {rows} rows of {cols} columns do not divide into words and groups of "
                    f"{group_size}", some.name)  # fmt: skip
    _check_shapes(stored, rows, cols, group_size, packing)
    layout = next(f"int4_group{size}" for size in (128, 64, 32) if group_size % size == 0)
    targets = tuple(
        Target(name if part == "weight" else f"{name}_{part}", dtype, shape, layout)
        for part, (dtype, shape) in resident_parts(layout, rows, cols).items()
    )
    others = tuple(stored[suffix] for suffix in ("qzeros", "scales", "g_idx") if suffix in stored)
    return Step(stored["qweight"], targets, converts=True, packing=packing, others=others)


def _check_shapes(stored: Mapping[str, TensorInfo], rows: int, cols: int, group_size: int, packing: Packing) -> None:
    groups = cols // group_size
    wanted = {
        "qweight": ("int32", (cols, rows // 8) if packing.method == "awq" else (cols // 8, rows)),
        "qzeros": ("int32", (groups, rows // 8)),
        "scales": ("float16", (groups, rows)),
        "g_idx": ("int32", (cols,)),
    }
    for suffix, tensor in stored.items():
        dtype, shape = wanted[suffix]
        if suffix == "scales" and tensor.dtype in ("bfloat16", "float32"):
            dtype = tensor.dtype
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise fault(
                tensor.file.path,
                f"is {tensor.dtype} {list(tensor.shape)}; {packing.method} of group size {packing.group_size} and "
                f"the configuration need {dtype} {list(shape)}",
                tensor.name,
            )
