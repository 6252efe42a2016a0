"""Graphs of decode steps without a GPU: which are made, in which order, how a step is padded, and when one is used.

The recorder of these tests notes what it captures; its graphs compute again when they are replayed, from what is then
in the inputs, as those of a GPU do.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from preload.engine.core.core import EngineCore
from preload.engine.core.graphs import DecodeGraphs, GraphInputs, decode_sizes, graph_keys
from preload.engine.core.loop import DrainAsked, StepLoop
from preload.engine.core.on_device import DeviceSteps
from preload.engine.core.speculation.build import speculate
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.timeline import Timeline, now_ns

CPU = torch.device("cpu")


def decodes(num_reqs: int, width: int = 2, num_tokens: int | None = None) -> AttentionBatch:
    num_tokens = num_reqs if num_tokens is None else num_tokens
    return AttentionBatch(
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32),
        seq_lens=torch.full((num_reqs,), 5, dtype=torch.int32),
        block_table=torch.full((num_reqs, width), 7, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens) + 28,
        num_decodes=num_reqs if num_tokens == num_reqs else num_reqs - 1,
    )


@pytest.fixture
def seen() -> list[tuple[torch.Tensor, AttentionBatch]]:
    return []


@pytest.fixture
def graphs(seen: list[Any], recorder: Any) -> DecodeGraphs:
    """Of a model that returns its ids as states, for 1, 2, 4 and 6 requests."""

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        seen.append((input_ids.clone(), batch))
        return input_ids[:, None].float()

    keys = graph_keys(decode_sizes(6, 512), 0, 512)
    return DecodeGraphs(forward, recorder, GraphInputs(6, 3, CPU, block_size=4), keys, 1000, longest_query=1)


@pytest.mark.parametrize(
    ("max_num_seqs", "token_budget", "sizes"),
    [(1, 512, [1]), (6, 512, [1, 2, 4, 6]), (20, 512, [1, 2, 4, 8, 16, 20]), (64, 8, [1, 2, 4, 8])],
)
def test_sizes_end_with_the_largest_step(max_num_seqs: int, token_budget: int, sizes: list[int]) -> None:
    assert decode_sizes(max_num_seqs, token_budget) == sizes


def test_the_largest_graph_is_captured_first_on_random_ids(graphs: DecodeGraphs, seen: list[Any]) -> None:
    order = []
    while (key := graphs.capture_next()) is not None:
        order.append(key)
    assert order == [(6, 6), (4, 4), (2, 2), (1, 1)]
    assert graphs.num_missing == 0
    ids = torch.cat([ids for ids, _ in seen])
    assert len(ids.unique()) > len(ids) / 3, "constant ids would take other paths than real ones"
    assert bool((ids >= 0).all() and (ids < 1000).all())
    for _, batch in seen:
        assert bool((batch.slot_mapping == -1).all()), "a capture must not write into the KV cache"
        assert not batch.block_table.any()


def test_a_step_is_padded_to_the_next_larger_graph(graphs: DecodeGraphs, seen: list[Any]) -> None:
    graphs.capture_all()
    ids = torch.tensor([11, 12, 13])
    got = graphs.run(ids, torch.tensor([4, 4, 4]), decodes(3))
    assert got is not None
    assert got.flatten().tolist() == [11, 12, 13]
    padded, batch = seen[-1]
    assert padded.tolist() == [11, 12, 13, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 3]
    assert batch.seq_lens.tolist() == [5, 5, 5, 0]
    assert batch.slot_mapping.tolist() == [28, 29, 30, -1]
    assert batch.block_table.tolist() == [[7, 7, 0]] * 3 + [[0, 0, 0]]
    assert batch.num_decodes == 4


def test_padding_is_clean_after_a_larger_step(graphs: DecodeGraphs, seen: list[Any]) -> None:
    graphs.capture_all()
    assert graphs.run(torch.arange(6), torch.zeros(6, dtype=torch.int64), decodes(6, width=3)) is not None
    assert graphs.run(torch.arange(5), torch.zeros(5, dtype=torch.int64), decodes(5, width=1)) is not None
    _, batch = seen[-1]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 5]
    assert batch.slot_mapping.tolist()[5:] == [-1]
    assert batch.block_table.tolist() == [[7, 0, 0]] * 5 + [[0, 0, 0]]


def test_the_smallest_graph_that_fits_is_used_and_none_where_none_does(graphs: DecodeGraphs) -> None:
    assert graphs.key_for(1, decodes(1)) is None, "nothing is captured yet"
    graphs.capture_next()
    assert graphs.key_for(1, decodes(1)) == (6, 6)
    graphs.capture_all()
    assert [graphs.key_for(n, decodes(n)) for n in (1, 2, 3, 5, 6)] == [(1, 1), (2, 2), (4, 4), (6, 6), (6, 6)]
    assert graphs.key_for(7, decodes(7)) is None
    assert graphs.key_for(0, decodes(0)) is None
    assert graphs.key_for(9, decodes(2, num_tokens=9)) is None, "a prompt in the step"
    assert graphs.key_for(2, decodes(2, width=4)) is None, "more blocks than the graphs' tables hold"


def verifying(lengths: list[int], width: int = 2) -> AttentionBatch:
    """A step with so many tokens of each request."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return AttentionBatch(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32) + 4,
        block_table=torch.full((len(lengths), width), 7, dtype=torch.int32),
        slot_mapping=torch.arange(int(starts[-1])) + 28,
        num_decodes=sum(length == 1 for length in lengths),
    )


def test_graphs_of_verifying_steps_are_those_of_full_drafts_as_far_as_a_step_may_be_that_large() -> None:
    assert graph_keys([1, 2, 4, 6], 3, 16) == [(1, 1), (2, 2), (4, 1), (4, 4), (6, 6), (8, 2), (16, 4)]
    assert graph_keys([1, 2], 7, 7) == [(1, 1), (2, 2)]


def test_steps_that_verify_are_padded_in_tokens_and_in_requests(seen: list[Any], recorder: Any) -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        seen.append((input_ids.clone(), batch))
        return input_ids[:, None].float()

    keys = graph_keys([1, 2, 4], 2, 512)
    inputs = GraphInputs(4, 3, CPU, 12, block_size=4)
    graphs = DecodeGraphs(forward, recorder, inputs, keys, 1000, longest_query=3)
    assert graphs.capture_next() == (12, 4)
    assert seen[0][1].query_start_loc.tolist() == [0, 3, 6, 9, 12]
    assert [graphs.capture_next() for _ in keys[1:]] == [(6, 2), (4, 4), (3, 1), (2, 2), (1, 1)]
    got = graphs.run(torch.arange(6) + 10, torch.zeros(6, dtype=torch.int64), verifying([1, 2, 3]))
    assert got is not None
    assert got.flatten().tolist() == [10, 11, 12, 13, 14, 15]
    ids, batch = seen[-1]
    assert ids.tolist() == [10, 11, 12, 13, 14, 15, *[0] * 6]
    assert batch.query_start_loc.tolist() == [0, 1, 3, 6, 6], "tokens beyond are nobody's"
    assert batch.seq_lens.tolist() == [5, 6, 7, 0]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31, 32, 33, *[-1] * 6]
    assert batch.num_decodes == 0
    assert graphs.key_for(2, verifying([1, 1])) == (2, 2)
    assert graphs.key_for(4, verifying([2, 2])) == (6, 2)
    assert graphs.key_for(7, verifying([1, 3, 3])) == (12, 4)
    assert graphs.key_for(7, verifying([3, 4])) is None, "more tokens of one request than any draft has: a prompt's"
    assert graphs.key_for(13, verifying([3, 3, 3, 3, 1])) is None


@pytest.mark.parametrize(("width", "block_size", "per_request"), [(3, 4, 8), (1, 16, 8), (1, 4, 8), (40, 16, 1)])
def test_captures_run_on_contexts_that_hold_their_tokens(width: int, block_size: int, per_request: int) -> None:
    inputs = GraphInputs(2, width, CPU, 2 * per_request, block_size=block_size)
    key = (2 * per_request, 2)
    for _ in range(5):
        inputs.randomize(key, 1000)
        _, positions, batch = inputs.view(key)
        assert bool((batch.query_start_loc.diff() >= 1).all())
        assert bool((batch.seq_lens >= batch.query_start_loc.diff()).all()), "a context is not less than nothing"
        assert int(batch.seq_lens.max()) <= width * block_size, "a table's end"
        assert int(batch.seq_lens.max()) <= per_request + block_size, "captures take no whole contexts"
        assert bool((positions < batch.seq_lens.max()).all())


def test_prompts_run_eagerly_beside_graphs_that_verify(
    tiny: Any, make_request: Any, run_core: Any, recorder: Any
) -> None:
    """Seven drafts a request make graphs as large as many a prompt."""
    decoder, seen = tiny.decoder(), []
    compute = decoder.forward

    def forward(ids: torch.Tensor, positions: torch.Tensor, layers: Any, batch: AttentionBatch) -> torch.Tensor:
        seen.append((int(batch.query_start_loc.diff().max()), batch.is_replayed))
        return compute(ids, positions, layers, batch)

    decoder.forward = forward
    steps = DeviceSteps(decoder, CPU, max_num_seqs=4, max_num_blocks=16, num_draft_tokens=7, recorder=recorder)
    settings = {"num_blocks": 65, "block_size": 4, "max_num_seqs": 4, "token_budget": 32, "max_model_len": 64}
    core = EngineCore(decoder, **settings, on_device=steps)
    speculate(core, "draft", num_draft_tokens=7, draft=tiny.decoder(), adaptive=False)
    core.use_graphs()
    while core.num_missing_graphs:
        core.capture_graph()
    assert steps.graphs is not None
    assert steps.graphs.keys[-1] == (32, 4)
    seen.clear()
    prompt = [5, 6, 7, 8] * 3
    finished = run_core(core, make_request("a", prompt, max_tokens=24))
    assert finished["a"].token_ids == tiny.greedy(prompt, 24)
    assert [replayed for longest, replayed in seen if longest > 8] == [False], "the prompt, and only it"
    assert all(replayed for longest, replayed in seen if longest <= 8)
    assert any(longest > 1 for longest, replayed in seen if replayed), "drafts are verified by graphs"


@pytest.fixture
def device_core(tiny: Any, recorder: Any) -> tuple[EngineCore, Any]:
    """A core whose steps go through the device's path, on the host."""
    decoder = tiny.decoder()
    steps = DeviceSteps(decoder, CPU, max_num_seqs=4, max_num_blocks=16, recorder=recorder)
    settings = {"num_blocks": 65, "block_size": 4, "max_num_seqs": 4, "token_budget": 32, "max_model_len": 64}
    return EngineCore(decoder, **settings, on_device=steps), recorder


PROMPTS = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7, 8, 9, 10]}


def test_tokens_are_the_same_by_graph_and_without(
    device_core: tuple[EngineCore, Any], tiny: Any, make_request: Any, run_core: Any
) -> None:
    core, recorder = device_core
    core.use_graphs()
    while core.num_missing_graphs:
        core.capture_graph()
    assert recorder.sizes == [4, 2, 1]
    finished = run_core(core, *(make_request(name, prompt) for name, prompt in PROMPTS.items()))
    assert {name: done.token_ids for name, done in finished.items()} == {
        name: tiny.greedy(prompt, 8) for name, prompt in PROMPTS.items()
    }
    assert [graph.num_replays for graph in recorder.graphs] == [7, 0, 0], "three decodes go into the graph of four"
    core.check_invariants()


def test_without_graphs_steps_are_eager(
    device_core: tuple[EngineCore, Any], tiny: Any, make_request: Any, run_core: Any
) -> None:
    core, recorder = device_core
    finished = run_core(core, make_request("a", PROMPTS["a"]))
    assert finished["a"].token_ids == tiny.greedy(PROMPTS["a"], 8)
    assert (core.num_missing_graphs, recorder.graphs) == (0, [])


def test_captures_and_warm_ups_leave_the_cache_alone(device_core: tuple[EngineCore, Any]) -> None:
    core, _ = device_core
    for keys, values in core.cache.layers:
        keys.zero_()
        values.zero_()
    core.warm_up(4)
    core.use_graphs()
    while core.num_missing_graphs:
        core.capture_graph()
    assert not any(part.any() for layer in core.cache.layers for part in layer)


def test_a_new_cache_drops_the_graphs_of_the_old(
    device_core: tuple[EngineCore, Any], tiny: Any, make_request: Any, run_core: Any
) -> None:
    core, recorder = device_core
    core.use_graphs()
    core.capture_graph()
    core.allocate_kv(33)
    finished = run_core(core, make_request("a", PROMPTS["a"]))
    assert finished["a"].token_ids == tiny.greedy(PROMPTS["a"], 8)
    assert recorder.graphs[0].num_replays == 0


def test_an_idle_core_makes_its_graphs_in_the_background(device_core: tuple[EngineCore, Any], wait_for: Any) -> None:
    core, recorder = device_core
    core.use_graphs()
    loop = StepLoop(core, Timeline())
    thread = threading.Thread(target=loop.run)
    thread.start()
    wait_for(lambda: not core.num_missing_graphs, "the graphs")
    loop.inbox.put(DrainAsked(now_ns()))
    thread.join(30)
    assert not thread.is_alive()
    assert recorder.sizes == [4, 2, 1]
