"""Properties of scheduler and block pool under random arrivals, aborts and preemptions. No tensors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preload.engine.core.kv_cache import BlockPool
from preload.engine.core.request import Request, SamplingParams
from preload.engine.core.scheduler import Schedule, Scheduler
from preload.engine.errors import RequestError

BLOCK_SIZE = 4


def request(name: str, prompt: int, max_tokens: int, priority: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_ids=[1] * prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        priority=priority,
    )


def make(num_blocks: int = 9, max_num_seqs: int = 4, token_budget: int = 8, max_model_len: int = 32) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=max_model_len,
    )


def commit(scheduler: Scheduler, plan: Schedule) -> list[Request]:
    """What the core does after a step; returns the requests that ended."""
    ended = []
    for item in plan.scheduled:
        samples = item.samples
        item.request.num_computed_tokens += item.num_new_tokens
        if samples:
            item.request.output_ids.append(2)
            if len(item.request.output_ids) == item.request.sampling.max_tokens:
                scheduler.finish(item.request)
                ended.append(item.request)
    return ended


def check(scheduler: Scheduler, plan: Schedule) -> None:
    """Invariants after `schedule`."""
    pool = scheduler.pool
    owned = [block for r in scheduler.running for block in r.block_ids]
    assert len(owned) == len(set(owned))
    assert 0 not in owned
    assert len(owned) + pool.num_free == pool.num_usable
    rows = [r.row for r in scheduler.running]
    assert len(rows) == len(set(rows))
    assert all(r.row == -1 and not r.block_ids and r.num_computed_tokens == 0 for r in scheduler.waiting)
    assert sum(item.num_new_tokens for item in plan.scheduled) <= scheduler.token_budget
    assert scheduler.running == sorted(scheduler.running, key=lambda r: r.order)
    for item in plan.scheduled:
        assert item.num_new_tokens >= 1
        covered = item.request.num_computed_tokens + item.num_new_tokens
        assert covered <= min(item.request.num_tokens, len(item.request.block_ids) * BLOCK_SIZE)
    assert {id(item.request) for item in plan.scheduled} == {id(r) for r in scheduler.running}
    assert not (plan.preempted and plan.started)


@settings(deadline=None, max_examples=150)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 12), st.integers(-1, 1)),
        min_size=1,
        max_size=14,
    ),
    aborts=st.dictionaries(st.integers(0, 13), st.integers(1, 40)),
    num_blocks=st.integers(9, 30),
    token_budget=st.integers(4, 20),
)
def test_random_arrivals_aborts_and_preemptions_all_complete(
    arrivals: list[tuple[int, int, int, int]], aborts: dict[int, int], num_blocks: int, token_budget: int
) -> None:
    scheduler = make(num_blocks=num_blocks, token_budget=token_budget)
    requests = {i: request(str(i), p, m, priority) for i, (_, p, m, priority) in enumerate(arrivals)}
    alive: set[int] = set()
    done: set[int] = set()
    for step in range(3000):
        for i, (at, *_) in enumerate(arrivals):
            if at == step:
                scheduler.add(requests[i])
                alive.add(i)
            if aborts.get(i) == step and i in alive:
                scheduler.finish(requests[i])
                alive.discard(i)
                done.add(i)
        plan = scheduler.schedule()
        check(scheduler, plan)
        for ended in commit(scheduler, plan):
            alive.discard(int(ended.request_id))
            done.add(int(ended.request_id))
        if len(done) == len(arrivals):
            break
    assert len(done) == len(arrivals)
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    assert not scheduler.has_requests


def test_a_long_prefill_is_chunked_beside_decodes_that_get_their_token() -> None:
    scheduler = make(num_blocks=30)
    scheduler.add(request("long", 20, 2))
    commit(scheduler, scheduler.schedule())
    scheduler.add(request("short", 2, 5))
    tokens = []
    for _ in range(4):
        plan = scheduler.schedule()
        tokens.append({i.request.request_id: i.num_new_tokens for i in plan.scheduled})
        commit(scheduler, plan)
    assert tokens[0] == {"long": 8}
    assert tokens[1] == {"long": 4, "short": 2}
    assert tokens[2] == {"long": 1, "short": 1}


def test_the_last_running_request_is_preempted_and_resumes_first() -> None:
    scheduler = make(num_blocks=5, max_model_len=16)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 4, 8 if name != "c" else 1))
    commit(scheduler, scheduler.schedule())
    commit(scheduler, scheduler.schedule())
    assert [r.request_id for r in scheduler.running] == ["a", "b"]
    preempted: list[str] = []
    for _ in range(20):
        plan = scheduler.schedule()
        preempted += [r.request_id for r in plan.preempted]
        commit(scheduler, plan)
        if plan.preempted:
            assert scheduler.waiting[0].request_id == "b"
    assert preempted
    assert set(preempted) == {"b"}
    assert not scheduler.has_requests


def test_lower_priority_values_run_first_and_are_preempted_last() -> None:
    scheduler = make(num_blocks=5, max_num_seqs=2, max_model_len=16)
    scheduler.add(request("later", 4, 10, priority=5))
    scheduler.add(request("urgent", 4, 10, priority=-5))
    plan = scheduler.schedule()
    assert [i.request.request_id for i in plan.scheduled] == ["urgent", "later"]
    preempted = []
    for _ in range(30):
        commit(scheduler, plan)
        plan = scheduler.schedule()
        preempted += [r.request_id for r in plan.preempted]
    assert set(preempted) == {"later"}


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    scheduler = make(num_blocks=6, token_budget=64)
    for name, prompt in (("a", 10), ("big", 16), ("small", 1)):
        scheduler.add(request(name, prompt, 2))
    assert [r.request_id for r in scheduler.schedule().started] == ["a"]


def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make(num_blocks=4)
    with pytest.raises(RequestError, match=r"20 tokens, 5 KV blocks of 4; the cache has 3"):
        scheduler.add(request("r", 10, 10))


def test_a_pool_gives_all_or_nothing_and_notices_a_double_release() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    assert pool.allocate(4) is None
    blocks = pool.allocate(3)
    assert blocks is not None
    assert sorted(blocks) == [1, 2, 3]
    assert pool.allocate(1) is None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks[:1])
