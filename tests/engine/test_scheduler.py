"""Properties of the scheduler under random arrivals, aborts and preemptions; its queues and policies. No tensors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preload.engine.core.invariants import check_scheduler
from preload.engine.core.kv_cache import BlockPool
from preload.engine.core.request import Request, SamplingParams
from preload.engine.core.scheduler import Policy, Schedule, Scheduler, SchedulingOptions
from preload.engine.errors import RequestError

BLOCK_SIZE = 4


def request(name: str, prompt: int, max_tokens: int, priority: int = 0, first: int = 1) -> Request:
    return Request(
        request_id=name,
        prompt_ids=[first] * prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        priority=priority,
    )


def make(
    num_blocks: int = 9, max_num_seqs: int = 4, token_budget: int = 8, max_model_len: int = 32, **options: Any
) -> Scheduler:
    """Without prefix caching unless told otherwise: these prompts are all alike."""
    return Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=max_model_len,
        options=SchedulingOptions(**{"prefix_caching": False, **options}),
    )


def commit(scheduler: Scheduler, plan: Schedule) -> list[Request]:
    """What the core does after a step; returns the requests that ended."""
    ended = []
    for item in plan.scheduled:
        samples = item.samples
        scheduler.advance(item.request, item.num_new_tokens)
        if samples:
            item.request.output_ids.append(2)
            if len(item.request.output_ids) == item.request.sampling.max_tokens:
                scheduler.finish(item.request)
                ended.append(item.request)
    check_scheduler(scheduler)
    return ended


def check(scheduler: Scheduler, plan: Schedule) -> None:
    """What `schedule` promises of its result."""
    assert sum(item.num_new_tokens for item in plan.scheduled) <= scheduler.token_budget
    for item in plan.scheduled:
        assert item.num_new_tokens >= 1
        covered = item.request.num_computed_tokens + item.num_new_tokens
        assert covered <= min(item.request.num_tokens, len(item.request.block_ids) * BLOCK_SIZE)
    assert {id(item.request) for item in plan.scheduled} == {id(r) for r in scheduler.running}
    assert bool(plan.scheduled) == scheduler.has_requests


def names(requests: list[Request]) -> list[str]:
    return [r.request_id for r in requests]


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
    policy=st.sampled_from(Policy),
    prefix_caching=st.booleans(),
    max_num_active_seqs=st.integers(0, 4),
    long_prefill_threshold=st.integers(0, 5),
)
def test_random_arrivals_aborts_and_preemptions_all_complete(
    arrivals: list[tuple[int, int, int, int]],
    aborts: dict[int, int],
    num_blocks: int,
    token_budget: int,
    **options: Any,
) -> None:
    scheduler = make(num_blocks=num_blocks, token_budget=token_budget, **options)
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


def test_a_long_prompt_leaves_room_for_others_only_where_there_are_some() -> None:
    scheduler = make(num_blocks=30, long_prefill_threshold=3)
    scheduler.add(request("long", 26, 2))
    tokens = []
    for step in range(3):
        if step == 1:
            scheduler.add(request("short", 2, 5))
        plan = scheduler.schedule()
        tokens.append({i.request.request_id: i.num_new_tokens for i in plan.scheduled})
        commit(scheduler, plan)
    assert tokens == [{"long": 8}, {"long": 3, "short": 2}, {"long": 3, "short": 1}]


def test_fewer_may_be_active_than_there_are_rows() -> None:
    scheduler = make(num_blocks=30, max_num_active_seqs=2)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 1, 2 if name == "a" else 5))
    commit(scheduler, scheduler.schedule())
    assert names(scheduler.running) == ["a", "b"]
    commit(scheduler, scheduler.schedule())
    commit(scheduler, scheduler.schedule())
    assert names(scheduler.running) == ["b", "c"]
    assert scheduler.deferred_waiting == []


def test_the_last_running_request_is_preempted_and_resumes_first() -> None:
    scheduler = make(num_blocks=5, max_model_len=16)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 4, 8 if name != "c" else 1))
    commit(scheduler, scheduler.schedule())
    commit(scheduler, scheduler.schedule())
    assert names(scheduler.running) == ["a", "b"]
    preempted: list[str] = []
    for _ in range(20):
        plan = scheduler.schedule()
        preempted += names(plan.preempted)
        commit(scheduler, plan)
        if plan.preempted:
            assert scheduler.waiting[0].request_id == "b"
    assert preempted
    assert set(preempted) == {"b"}
    assert not scheduler.has_requests


@pytest.mark.parametrize(("policy", "first"), [(Policy.PRIORITY, "urgent"), (Policy.FCFS, "later")])
def test_lower_priority_values_run_first_and_are_preempted_last_if_priorities_count(
    policy: Policy, first: str
) -> None:
    scheduler = make(num_blocks=5, max_num_seqs=2, max_model_len=16, policy=policy)
    scheduler.add(request("later", 4, 10, priority=5))
    scheduler.add(request("urgent", 4, 10, priority=-5))
    plan = scheduler.schedule()
    assert plan.scheduled[0].request.request_id == first
    preempted = []
    for _ in range(30):
        commit(scheduler, plan)
        plan = scheduler.schedule()
        preempted += names(plan.preempted)
    assert set(preempted) == {"later", "urgent"} - {first}


def test_a_more_urgent_request_takes_a_row_and_leaves_the_blocks() -> None:
    scheduler = make(num_blocks=20, max_num_seqs=1, policy=Policy.PRIORITY)
    scheduler.add(request("patient", 7, 9))
    commit(scheduler, scheduler.schedule())
    (patient,) = scheduler.running
    blocks, computed = list(patient.block_ids), patient.num_computed_tokens
    scheduler.add(request("urgent", 2, 2, priority=-1))
    plan = scheduler.schedule()
    assert (names(plan.held), names(plan.started), plan.preempted) == (["patient"], ["urgent"], [])
    assert scheduler.kv_holding_waiting == [patient]
    assert (patient.block_ids, patient.num_computed_tokens, patient.row) == (blocks, computed, -1)
    commit(scheduler, plan)
    commit(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert [(i.request.request_id, i.num_new_tokens) for i in plan.scheduled] == [("patient", 1)]
    assert scheduler.num_preemptions == 0


def test_a_holder_goes_on_while_a_newcomer_without_blocks_waits_at_the_head() -> None:
    """Six blocks, five usable: the holder has three and the newcomer, though more urgent, needs four."""
    scheduler = make(num_blocks=6, max_num_seqs=1, max_model_len=20, token_budget=20, policy=Policy.PRIORITY)
    scheduler.add(request("holder", 9, 5))
    commit(scheduler, scheduler.schedule())
    scheduler.add(request("short", 1, 1, priority=-1))
    commit(scheduler, scheduler.schedule())
    assert names(scheduler.kv_holding_waiting) == ["holder"]
    assert len(scheduler.kv_holding_waiting[0].block_ids) == 3
    scheduler.add(request("newcomer", 13, 2, priority=-2))
    plan = scheduler.schedule()
    assert names(plan.started) == ["holder"]
    assert names(scheduler.waiting) == ["newcomer"]
    finished = []
    for _ in range(12):
        finished += names(commit(scheduler, plan))
        plan = scheduler.schedule()
    assert finished == ["holder", "newcomer"]
    assert scheduler.num_preemptions == 0


def test_blocks_of_a_holder_are_taken_before_a_running_request_is_preempted() -> None:
    scheduler = make(num_blocks=6, max_num_seqs=1, max_model_len=20, token_budget=20, policy=Policy.PRIORITY)
    scheduler.add(request("holder", 9, 5))
    commit(scheduler, scheduler.schedule())
    scheduler.add(request("urgent", 4, 12, priority=-1))
    preempted, finished = [], []
    for _ in range(30):
        plan = scheduler.schedule()
        preempted += names(plan.preempted)
        finished += names(commit(scheduler, plan))
    assert preempted == ["holder"]
    assert finished == ["urgent", "holder"]


def test_holders_do_not_wait_for_each_others_blocks() -> None:
    scheduler = make(num_blocks=6, max_num_seqs=2, max_model_len=20, token_budget=40)
    for name in ("a", "b"):
        scheduler.add(request(name, 8, 9))
    commit(scheduler, scheduler.schedule())
    for running in list(scheduler.running):
        scheduler.hold(running)
    scheduler.pool.allocate(scheduler.pool.num_free)  # somebody else's, for good
    plan = scheduler.schedule()
    assert (names(plan.started), names(plan.preempted)) == (["a"], ["b"])


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    scheduler = make(num_blocks=6, token_budget=64)
    for name, prompt in (("a", 10), ("big", 16), ("small", 1)):
        scheduler.add(request(name, prompt, 2))
    assert names(scheduler.schedule().started) == ["a"]
    assert names(scheduler.deferred_waiting) == ["big"]


def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make(num_blocks=4)
    with pytest.raises(RequestError, match=r"20 tokens, 5 KV blocks of 4; the cache has 3"):
        scheduler.add(request("r", 10, 10))


def test_a_beginning_that_was_computed_before_is_not_computed_again() -> None:
    scheduler = make(num_blocks=30, token_budget=64, prefix_caching=True)
    scheduler.add(request("first", 10, 1))
    commit(scheduler, scheduler.schedule())
    longer = request("longer", 10, 2)
    longer.prompt_ids += [7, 7, 7]
    salted = request("salted", 10, 1)
    salted.cache_salt = "somebody else's"
    for newcomer in (longer, salted, request("same", 8, 1)):
        scheduler.add(newcomer)
    plan = scheduler.schedule()
    assert [i.num_new_tokens for i in plan.scheduled] == [13 - 8, 10, 8 - 4]  # one token at least is computed
    assert [i.request.num_cached_tokens for i in plan.scheduled] == [8, 0, 4]
    counters = scheduler.prefix_counters
    assert (counters.num_queried_tokens, counters.num_hit_tokens) == (10 + 13 + 10 + 8, 8 + 4)
    commit(scheduler, plan)
    assert scheduler.running == [longer]


def test_a_preempted_request_finds_what_is_left_of_its_own_blocks() -> None:
    scheduler = make(num_blocks=9, token_budget=64, prefix_caching=True)
    scheduler.add(request("a", 12, 16, first=1))
    scheduler.add(request("b", 12, 16, first=2))
    plan = scheduler.schedule()
    while not plan.preempted:
        commit(scheduler, plan)
        plan = scheduler.schedule()
    (preempted,) = plan.preempted
    assert (preempted.request_id, preempted.num_computed_tokens) == ("b", 0)
    while preempted.row < 0:
        commit(scheduler, plan)
        plan = scheduler.schedule()
    assert preempted.num_computed_tokens > 0
    assert scheduler.prefix_counters.num_hit_tokens == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_finished_request_leaves_all_of_its_blocks_to_others(prefix_caching: bool) -> None:
    scheduler = make(num_blocks=9, token_budget=64, prefix_caching=prefix_caching)
    for number in range(5):
        scheduler.add(request(str(number), 30, 2, first=number))
        for _ in range(2):
            commit(scheduler, scheduler.schedule())
        assert scheduler.pool.num_free == 8
