"""How near GPU kernels come to what the device can do: bytes that have to be read, or operations to be done.

The floors are measured too: a large copy for bytes, a large product of bfloat16 matrices for operations. Needs a GPU
and a build of torch with CUDA.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .kernel_cases import make_weight

ROWS = COLS = 8192
DECODES, CONTEXT, HEADS = 64, 4096, (32, 8, 128)
_REPEATS = 20


def run(device: torch.device) -> dict[str, Any]:
    """`copy_gb_per_s`, `matmul_tflop_per_s`, and a row for each kernel in `kernels`."""
    copy_gb_per_s, matmul_tflop_per_s = _copy(device), _matmul(device)
    rows = []
    for name, kind, work, amount in _cases(device):
        seconds = _seconds(work)
        floor_s = amount / (copy_gb_per_s * 1e9 if kind == "bytes" else matmul_tflop_per_s * 1e12)
        rows.append(
            {
                "kernel": name,
                "us": round(seconds * 1e6, 1),
                "floor_us": round(floor_s * 1e6, 1),
                "share_of_floor": round(floor_s / seconds, 3),
                "bound_by": kind,
                "per_s": f"{amount / seconds / 1e9:.0f} GB/s" if kind == "bytes"
                else f"{amount / seconds / 1e12:.1f} TFLOP/s",
            }
        )  # fmt: skip
    return {"copy_gb_per_s": copy_gb_per_s, "matmul_tflop_per_s": matmul_tflop_per_s, "kernels": rows}


def names() -> list[str]:
    """Of the rows there would be, for a machine that cannot measure them."""
    from preload.engine.kernels.triton.products import LAYOUTS

    products = [f"product, {layout}, {tokens} tokens" for layout in ("dense", *LAYOUTS) for tokens in (1, 16, 512)]
    return [*products, f"attention, {DECODES} decodes at {CONTEXT}", f"attention, prefill of {CONTEXT}"]


def _cases(device: torch.device) -> Iterator[tuple[str, str, Callable[[], object], float]]:
    """(name, what bounds it, the work, bytes or operations)"""
    from preload.engine.kernels.triton.products import LAYOUTS, product

    for layout in ("dense", *LAYOUTS):
        parts = {name: part.to(device) for name, part in _weight(layout).items()}
        num_bytes = sum(part.numel() * part.element_size() for part in parts.values())
        for tokens in (1, 16, 512):
            x = torch.randn(tokens, COLS, device=device, dtype=torch.bfloat16)
            name = f"product, {layout}, {tokens} tokens"
            dense = parts["weight"]
            work = partial(torch.matmul, x, dense.T) if layout == "dense" else partial(product, x, layout, parts)
            bound = ("operations", 2.0 * tokens * ROWS * COLS) if tokens > 256 else ("bytes", float(num_bytes))
            yield name, bound[0], work, bound[1]
    yield from _attention(device)


def _weight(layout: str) -> dict[str, Tensor]:
    """A weight of a few rows, repeated: what it holds does not change how long it takes."""
    small = make_weight(layout, 256, COLS, torch.bfloat16).parts
    repeats = ROWS // 256
    return {
        name: part.repeat(repeats, *(1 for _ in part.shape[1:])) if part.shape[0] > 1 or name == "weight" else part
        for name, part in ((name, part) for name, part in small.items())
    }


def _attention(device: torch.device) -> Iterator[tuple[str, str, Callable[[], object], float]]:
    from preload.engine.kernels.attention import AttentionBatch
    from preload.engine.kernels.triton.attention import paged_attention

    num_heads, num_kv_heads, head_dim = HEADS
    per_sequence = CONTEXT // 16
    shape = (DECODES * per_sequence + 1, 16, num_kv_heads, head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.arange(1, shape[0], dtype=torch.int32, device=device).view(DECODES, per_sequence)
    for num_reqs, num_query in ((DECODES, 1), (1, CONTEXT)):
        query = torch.randn(num_reqs * num_query, num_heads, head_dim, device=device, dtype=torch.bfloat16)
        batch = AttentionBatch(
            query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * num_query,
            seq_lens=torch.full((num_reqs,), CONTEXT, dtype=torch.int32, device=device),
            block_table=table[:num_reqs],
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
            num_decodes=num_reqs if num_query == 1 else 0,
        )
        is_decode = num_query == 1
        name = f"attention, {DECODES} decodes at {CONTEXT}" if is_decode else f"attention, prefill of {CONTEXT}"
        num_bytes = 2.0 * 2 * num_reqs * CONTEXT * num_kv_heads * head_dim
        operations = 2.0 * CONTEXT * CONTEXT * num_heads * head_dim  # two products, half of each masked
        yield (
            name,
            "bytes" if is_decode else "operations",
            partial(paged_attention, query, keys, values, batch),
            num_bytes if is_decode else operations,
        )


def _copy(device: torch.device) -> float:
    """GB/s, bytes read and bytes written counted alike."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return round(2 * source.numel() / _seconds(lambda: target.copy_(source)) / 1e9, 1)


def _matmul(device: torch.device) -> float:
    side = 8192
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return round(2 * side**3 / _seconds(lambda: a @ b) / 1e12, 1)


def _seconds(work: Callable[[], object]) -> float:
    """Median of one call, by the device's own clock; the first calls compile and warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return float(statistics.median(times))
