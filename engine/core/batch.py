"""Persistent batch: what a step needs of every running request, in fixed tensors.

Owns the rows' contents, not who has which row (that is the scheduler's). A request owns one row until it
finishes, is preempted or held; rows are never reordered, a step gathers through `idx_mapping`. Writes are collected
on the host and applied at once, before a step's inputs are built. A row's tail beyond its request's tokens is stale,
never read; beyond its blocks it is 0, the null block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StagedTensor:
    """A tensor of rows whose writes are collected and scattered by one `apply`.

    Where writes overlap, ranges win over single values, and among each the later: single values are what a finished
    step appends, ranges what a row's next owner begins with."""

    def __init__(self, num_rows: int, num_cols: int, dtype: torch.dtype) -> None:
        self.tensor: Tensor = torch.zeros(num_rows, num_cols, dtype=dtype)
        self._flat = self.tensor.view(-1)
        self._num_cols = num_cols
        self._index: list[int] = []
        self._values: list[int] = []
        self._ranges: list[tuple[int, Sequence[int]]] = []

    def stage(self, row: int, start: int, values: Sequence[int]) -> None:
        """Collects tensor[row, start : start + len(values)] = values."""
        if start < 0 or start + len(values) > self._num_cols:
            raise AssertionError(f"write of {len(values)} at {start} leaves a row of {self._num_cols}")
        if values:
            self._ranges.append((row * self._num_cols + start, values))

    def stage_one(self, row: int, column: int, value: int) -> None:
        """Collects tensor[row, column] = value."""
        if not 0 <= column < self._num_cols:
            raise AssertionError(f"write of 1 at {column} leaves a row of {self._num_cols}")
        self._index.append(row * self._num_cols + column)
        self._values.append(value)

    def apply(self) -> None:
        """Scatters what was staged since the last call."""
        if self._index:
            self._flat[torch.tensor(self._index)] = torch.tensor(self._values, dtype=self.tensor.dtype)
            self._index, self._values = [], []
        for start, values in self._ranges:
            self._flat[start : start + len(values)] = torch.tensor(values, dtype=self.tensor.dtype)
        self._ranges.clear()


BlockWrite = tuple[int, int, Sequence[int]]
"""(row, first column, blocks) of a block table."""


class PersistentBatch:
    """The rows: token_ids int32[max_num_seqs, max_model_len], block_table int32[max_num_seqs, max_blocks],
    num_computed_tokens int64[max_num_seqs]."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.num_computed_tokens = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._token_ids = StagedTensor(max_num_seqs, max_model_len, torch.int32)
        self._block_table = StagedTensor(max_num_seqs, -(-max_model_len // block_size), torch.int32)
        self._num_blocks = [0] * max_num_seqs
        self._block_writes: list[BlockWrite] | None = None

    @property
    def token_ids(self) -> Tensor:
        return self._token_ids.tensor

    @property
    def block_table(self) -> Tensor:
        return self._block_table.tensor

    def start(self, row: int, token_ids: Sequence[int], blocks: Sequence[int], num_computed_tokens: int = 0) -> None:
        """A request takes a row; the first num_computed_tokens of it are in the KV cache already."""
        self._token_ids.stage(row, 0, token_ids)
        left_over = self._num_blocks[row] - len(blocks)
        self._stage_blocks(row, 0, [*blocks, *([0] * left_over)])
        self._num_blocks[row] = len(blocks)
        self.num_computed_tokens[row] = num_computed_tokens

    def append_blocks(self, row: int, blocks: Sequence[int]) -> None:
        self._stage_blocks(row, self._num_blocks[row], blocks)
        self._num_blocks[row] += len(blocks)

    def _stage_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._block_table.stage(row, start, blocks)
        if self._block_writes is not None and blocks:
            self._block_writes.append((row, start, blocks))

    def take_block_writes(self) -> list[BlockWrite]:
        """What was staged for the block table since the last call, in order, for a copy of it that is kept somewhere
        else: it begins as zeros, and with the first call."""
        writes, self._block_writes = self._block_writes, []
        return writes if writes is not None else self._all_block_writes()

    def _all_block_writes(self) -> list[BlockWrite]:
        self._block_table.apply()
        rows = self.block_table.tolist()
        return [(row, 0, rows[row][:count]) for row, count in enumerate(self._num_blocks) if count]

    def append_token(self, row: int, position: int, token_id: int) -> None:
        self._token_ids.stage_one(row, position, token_id)

    def advance(self, rows: Tensor, num_tokens: Tensor) -> None:
        """A step has computed num_tokens more of each row. rows, num_tokens: int64[num_reqs], each row once."""
        self.num_computed_tokens.index_add_(0, rows, num_tokens)

    def num_blocks(self, rows: Sequence[int]) -> int:
        """The most blocks that one of the rows has."""
        return max(self._num_blocks[row] for row in rows)

    def apply(self) -> None:
        """Applies every staged write; called once per step."""
        self._token_ids.apply()
        self._block_table.apply()
