"""Writes by index on GPUs: keys and values by slot, staged ranges by row.

References: attention.write_kv, staging.scatter_ranges.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def write_kv_kernel(
    key_cache, value_cache, key, value, slot_mapping, num_elements, key_stride, value_stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = elements < num_elements
        to = slot * num_elements + elements
        tl.store(key_cache + to, tl.load(key + token * key_stride + elements, mask=mask), mask=mask)
        tl.store(value_cache + to, tl.load(value + token * value_stride + elements, mask=mask), mask=mask)


def write_kv(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """attention.write_kv. Caches contiguous; key, value: dtype[num_tokens, num_kv_heads, head_dim], heads of a token
    adjacent; slot_mapping: int64[num_tokens], −1 is not written."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if not num_tokens:
        return
    num_elements = num_kv_heads * head_dim
    block = min(1024, triton.next_power_of_2(num_elements))
    write_kv_kernel[(num_tokens, triton.cdiv(num_elements, block))](
        key_cache, value_cache, key, value, slot_mapping, num_elements, key.stride(0), value.stride(0), BLOCK=block
    )


@triton.jit
def scatter_ranges_kernel(table, rows, starts, offsets, values, num_writes, row_stride, BLOCK: tl.constexpr):
    """Programs of a row's first write do all of that row's, one after the other: the later one wins."""
    first = tl.program_id(0)
    row = tl.load(rows + first)
    before = row - 1  # any other row
    if first > 0:
        before = tl.load(rows + first - 1)
    if before != row:
        write = first
        same = row
        while same == row:
            start, begin, end = tl.load(starts + write), tl.load(offsets + write), tl.load(offsets + write + 1)
            to = table + row.to(tl.int64) * row_stride + start
            for at in range(begin, end, BLOCK):
                index = at + tl.arange(0, BLOCK)
                piece = tl.load(values + index, mask=index < end)
                tl.store(to + index - begin, piece, mask=index < end)
            tl.debug_barrier()  # other threads of this program may write the same places next
            write += 1
            same = row - 1
            if write < num_writes:
                same = tl.load(rows + write)


def scatter_ranges(table: Tensor, rows: Tensor, starts: Tensor, offsets: Tensor, values: Tensor) -> None:
    """staging.scatter_ranges, with the writes of a row next to each other: who stages them groups them by row."""
    num_writes = rows.shape[0]
    if num_writes:
        scatter_ranges_kernel[(num_writes,)](
            table, rows, starts, offsets, values, num_writes, table.stride(0), BLOCK=256, num_warps=4
        )
