"""Ragged writes into a tensor of rows, plain torch: the specification of any faster version.

A step collects what changed on the host and applies it at once. Where writes overlap, the later one wins.
"""

from __future__ import annotations

from torch import Tensor


def scatter_ranges(table: Tensor, rows: Tensor, starts: Tensor, offsets: Tensor, values: Tensor) -> None:
    """table[rows[i], starts[i] :] takes values[offsets[i] : offsets[i + 1]], for each write i in order.

    table: dtype[num_rows, num_cols]; rows, starts: int32[num_writes]; offsets: int32[num_writes + 1];
    values: dtype[num_values].
    """
    ends = offsets.tolist()
    for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        piece = values[ends[i] : ends[i + 1]]
        table[row, start : start + len(piece)] = piece
