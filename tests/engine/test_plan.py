"""Places of resident tensors."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preload.engine.errors import RequestError
from preload.engine.loading.plan import ALIGNMENT, MAX_SEGMENT_BYTES, make_plan
from preload.engine.loading.steps import Target


def targets(sizes: list[int]) -> list[Target]:
    return [Target(f"t{index}", "uint8", (size,)) for index, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(1, 20_000))
def test_tensors_never_overlap_and_stay_inside_their_segments(sizes: list[int], limit: int) -> None:
    plan = make_plan(targets(sizes), limit)
    ends = [0] * len(plan.segment_bytes)
    for target in targets(sizes):
        place = plan.places[target.name]
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= ends[place.segment]
        ends[place.segment] = place.offset + target.num_bytes
        assert place.offset < plan.segment_bytes[place.segment]
        assert ends[place.segment] <= plan.segment_bytes[place.segment]
        assert ends[place.segment] <= limit or place.offset == 0 or target.num_bytes == 0
    assert all(size > 0 and size % mmap.PAGESIZE == 0 for size in plan.segment_bytes)
    assert all(end > 0 for end in ends) or len(ends) == 1


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_little_memory_is_lost_between_tensors(sizes: list[int]) -> None:
    plan = make_plan(targets(sizes))
    assert len(plan.segment_bytes) == 1
    assert plan.segment_bytes[0] <= sum(sizes) + ALIGNMENT * len(sizes) + mmap.PAGESIZE


def test_a_tensor_larger_than_a_segment_gets_its_own() -> None:
    plan = make_plan(targets([100, MAX_SEGMENT_BYTES + 1, 100]))
    assert [plan.places[f"t{index}"].segment for index in range(3)] == [0, 1, 2]
    assert plan.segment_bytes[1] >= MAX_SEGMENT_BYTES + 1
    assert plan.segment_bytes[0] == plan.segment_bytes[2] == mmap.PAGESIZE


@pytest.mark.parametrize(("num_tensors", "size"), [(129, MAX_SEGMENT_BYTES), (1, 1 << 61)])
def test_more_than_a_machine_holds_is_refused(num_tensors: int, size: int) -> None:
    with pytest.raises(RequestError, match="need more than 128 segments or"):
        make_plan(targets([size] * num_tensors))


def test_tensors_without_elements_have_a_place() -> None:
    plan = make_plan(targets([0, 0]))
    assert plan.segment_bytes == [mmap.PAGESIZE]
