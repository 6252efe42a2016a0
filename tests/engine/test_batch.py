"""The persistent batch: staged writes land where they were meant to, and rows change owners cleanly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preload.engine.core.batch import PersistentBatch, StagedTensor

ROWS, COLS = 4, 12


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 4)), max_size=8), max_size=4))
def test_one_apply_equals_the_writes_one_by_one(steps: list[list[tuple[int, int]]]) -> None:
    staged, expected = StagedTensor(ROWS, COLS, torch.int32), torch.zeros(ROWS, COLS, dtype=torch.int32)
    value, ends = 0, [0] * ROWS
    for writes in steps:
        for row, count in writes:
            start = ends[row] if ends[row] + count <= COLS else 0
            values = list(range(value, value + count))
            staged.stage(row, start, values)
            expected[row, start : start + count] = torch.tensor(values, dtype=torch.int32)
            ends[row], value = start + count, value + count
        staged.apply()
        assert torch.equal(staged.tensor, expected)


def test_writes_beyond_a_row_are_broken_invariants() -> None:
    staged = StagedTensor(ROWS, COLS, torch.int32)
    with pytest.raises(AssertionError, match="write of 3 at 10 leaves a row of 12"):
        staged.stage(0, 10, [1, 2, 3])
    with pytest.raises(AssertionError, match="write of 1 at 12 leaves a row of 12"):
        staged.stage_one(0, 12, 1)


def test_a_row_shows_nothing_of_its_last_owner() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=16, block_size=4)
    batch.start(1, [1, 2, 3], [5, 7, 9, 2])
    batch.apply()
    batch.append_token(1, 3, 99)
    batch.advance(torch.tensor([1]), torch.tensor([3]))
    batch.start(1, [7, 8, 9, 10, 11], [3, 4])
    batch.append_blocks(1, [8])
    batch.apply()
    assert batch.token_ids[1, :5].tolist() == [7, 8, 9, 10, 11]
    assert batch.block_table[1].tolist() == [3, 4, 8, 0]
    assert batch.num_computed_tokens.tolist() == [0, 0]
    assert not batch.token_ids[0].any()


def test_a_row_goes_on_where_its_prefix_ends() -> None:
    batch = PersistentBatch(max_num_seqs=3, max_model_len=16, block_size=4)
    batch.start(2, [1, 2, 3, 4, 5], [6, 1], num_computed_tokens=4)
    batch.advance(torch.tensor([2, 0]), torch.tensor([1, 3]))
    assert batch.num_computed_tokens.tolist() == [3, 0, 5]
    assert batch.num_blocks([0, 2]) == 2
