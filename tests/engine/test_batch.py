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
            if start == 0:
                staged.restart(row)
                expected[row] = staged.tensor[row]  # what was staged for the last owner is never applied
            values = list(range(value, value + count))
            staged.stage(row, start, values)
            expected[row, start : start + count] = torch.tensor(values, dtype=torch.int32)
            ends[row], value = start + count, value + count
        staged.apply()
        assert torch.equal(staged.tensor, expected)


def test_a_write_beyond_a_row_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="write of 3 at 10 leaves a row of 12"):
        StagedTensor(ROWS, COLS, torch.int32).stage(0, 10, [1, 2, 3])


def test_a_row_forgets_what_was_staged_for_its_last_owner() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=16, block_size=4)
    batch.start(1, [1, 2, 3], [5])
    batch.apply()
    batch.append_token(1, 3, 99)
    batch.append_blocks(1, [6])
    batch.set_computed(1, 3)
    batch.start(1, [7, 8, 9, 10, 11], [3, 4])
    batch.append_blocks(1, [8])
    batch.apply()
    assert batch.token_ids[1, :5].tolist() == [7, 8, 9, 10, 11]
    assert batch.block_table[1, :3].tolist() == [3, 4, 8]
    assert batch.num_computed_tokens.tolist() == [0, 0]
    assert not batch.token_ids[0].any()
