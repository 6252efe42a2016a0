"""Persistent batch: what a step needs of every running request, in fixed tensors.

Owns the rows' contents, not who has which row (that is the scheduler's). A request owns one row until it
finishes or is preempted; rows are never reordered, a step gathers through `idx_mapping`. Writes are collected on
the host and applied at once, before a step's inputs are built. A row's tail beyond its request is stale, never
read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StagedTensor:
    """A tensor of rows whose ragged writes are collected and scattered by one `apply`."""

    def __init__(self, num_rows: int, num_cols: int, dtype: torch.dtype) -> None:
        self.tensor: Tensor = torch.zeros(num_rows, num_cols, dtype=dtype)
        self._staged: dict[int, dict[int, Sequence[int]]] = {}  # row → start → values

    def stage(self, row: int, start: int, values: Sequence[int]) -> None:
        """Collects tensor[row, start : start + len(values)] = values. Writes of one row must not overlap, but one
        at the same start replaces what was staged there."""
        if start < 0 or start + len(values) > self.tensor.shape[1]:
            raise AssertionError(f"write of {len(values)} at {start} leaves a row of {self.tensor.shape[1]}")
        if values:
            self._staged.setdefault(row, {})[start] = values

    def restart(self, row: int) -> None:
        """Forgets what is staged for a row: it was its last owner's."""
        self._staged.pop(row, None)

    def apply(self) -> None:
        """Scatters what was staged since the last call."""
        if not self._staged:
            return
        num_cols = self.tensor.shape[1]
        writes = [
            (row * num_cols + at, v) for row, row_writes in self._staged.items() for at, v in row_writes.items()
        ]
        lengths = torch.tensor([len(values) for _, values in writes])
        ends = lengths.cumsum(0)
        shift = torch.tensor([start for start, _ in writes]) - (ends - lengths)
        index = torch.arange(int(ends[-1])) + shift.repeat_interleave(lengths)
        flat = [value for _, values in writes for value in values]
        self.tensor.view(-1)[index] = torch.tensor(flat, dtype=self.tensor.dtype)
        self._staged = {}


class PersistentBatch:
    """The rows: token_ids int32[max_num_seqs, max_model_len], block_table int32[max_num_seqs, max_blocks],
    num_computed_tokens int32[max_num_seqs, 1]."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self._token_ids = StagedTensor(max_num_seqs, max_model_len, torch.int32)
        self._block_table = StagedTensor(max_num_seqs, -(-max_model_len // block_size), torch.int32)
        self._num_computed = StagedTensor(max_num_seqs, 1, torch.int32)
        self._num_blocks = [0] * max_num_seqs

    @property
    def token_ids(self) -> Tensor:
        return self._token_ids.tensor

    @property
    def block_table(self) -> Tensor:
        return self._block_table.tensor

    @property
    def num_computed_tokens(self) -> Tensor:
        return self._num_computed.tensor.view(-1)

    def start(self, row: int, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """A request takes a row; nothing of it is computed yet."""
        for staged in (self._token_ids, self._block_table, self._num_computed):
            staged.restart(row)
        self._token_ids.stage(row, 0, token_ids)
        self._num_computed.stage(row, 0, [0])
        self._num_blocks[row] = 0
        self.append_blocks(row, blocks)

    def append_blocks(self, row: int, blocks: Sequence[int]) -> None:
        self._block_table.stage(row, self._num_blocks[row], blocks)
        self._num_blocks[row] += len(blocks)

    def append_token(self, row: int, position: int, token_id: int) -> None:
        self._token_ids.stage(row, position, [token_id])

    def set_computed(self, row: int, num_computed_tokens: int) -> None:
        self._num_computed.stage(row, 0, [num_computed_tokens])

    def apply(self) -> None:
        """Applies every staged write; called once per step."""
        self._token_ids.apply()
        self._block_table.apply()
        self._num_computed.apply()
