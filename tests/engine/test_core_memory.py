"""A core that runs out of memory in a step: one request ends, the others go on."""

from __future__ import annotations

import contextlib
import ctypes
import random
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from preload.engine.core.memory import is_out_of_memory
from preload.engine.core.request import FinishReason


@contextlib.contextmanager
def little_memory(spare_bytes: int) -> Iterator[None]:
    """This process may take no more than `spare_bytes` of new address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_step_that_memory_does_not_suffice_for_costs_its_largest_request(
    tiny_model: Any, make_core: Any, make_request: Any
) -> None:
    model = tiny_model(max_position_embeddings=4096)
    core = make_core(model, num_blocks=1100, token_budget=2048, max_model_len=4000)
    rng = random.Random(0)
    core.add_request(make_request("small", [1, 2, 3], max_tokens=12))
    outputs = core.step()
    core.add_request(make_request("large", [rng.randrange(97) for _ in range(2000)]))
    core.add_request(make_request("other", [4, 5], max_tokens=6))
    with little_memory(48 << 20):  # the attention scores of the large one alone take 61 MiB
        while core.has_work:
            outputs += core.step()
    (failed,) = [o for o in outputs if o.request_id == "large"]
    assert failed.finish_reason is FinishReason.ERROR
    assert "not enough memory to compute 2000 tokens of a sequence of 2000" in failed.error
    for name, prompt, count in (("small", [1, 2, 3], 12), ("other", [4, 5], 6)):
        assert [t for o in outputs if o.request_id == name for t in o.token_ids] == model.greedy(prompt, count)
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable


def test_any_other_error_of_a_step_is_raised(
    tiny: Any, make_core: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny)

    def broken(*_: object) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(core.runner, "forward", broken)
    core.add_request(make_request("r", [1]))
    with pytest.raises(RuntimeError, match="shapes"):
        core.step()


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert not is_out_of_memory(RuntimeError("no such kernel"))


def test_the_largest_steps_leave_requests_alone(tiny: Any, make_core: Any, make_request: Any) -> None:
    core = make_core(tiny)
    core.add_request(make_request("r", [4, 5, 6]))
    tokens = []
    while core.has_work:
        core.largest_steps()
        tokens += [t for o in core.step() for t in o.token_ids]
    assert tokens == tiny.greedy([4, 5, 6], 8)


def resident_bytes(core: Any) -> int:
    """Of the KV cache's memory; what nobody has touched is not resident."""
    address, num_bytes = core.cache._storage.data_ptr(), core.cache.num_bytes
    pages = (address % resource.getpagesize() + num_bytes + resource.getpagesize() - 1) // resource.getpagesize()
    found = (ctypes.c_ubyte * pages)()
    start = address // resource.getpagesize() * resource.getpagesize()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), found) == 0
    return sum(page & 1 for page in found) * resource.getpagesize()


def test_an_idle_core_has_memory_found_for_what_requests_will_need_and_no_more(
    tiny_model: Any, make_core: Any, make_request: Any, run_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preload.engine.core.core._AHEAD_BYTES", 16 << 20)
    core = make_core(tiny_model(), num_blocks=1 << 15)
    assert core.cache.num_bytes == 64 << 20
    assert resident_bytes(core) <= 2 << 20
    num_slices = sum(1 for _ in iter(core.populate_ahead, False))
    assert num_slices == 8
    assert 16 << 20 <= resident_bytes(core) <= 20 << 20
    run_core(core, make_request("r", [1, 2, 3], max_tokens=8))  # which takes three blocks
    assert core.populate_ahead()
    assert not core.populate_ahead()
    core.allocate_kv(1 << 12)
    assert sum(1 for _ in iter(core.populate_ahead, False)) == 4
    assert resident_bytes(core) == core.cache.num_bytes


def test_a_kernel_that_populates_nothing_is_not_asked_again_and_again(
    tiny_model: Any, make_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preload.engine.core.kv_cache.populate", lambda *_: False)
    assert not make_core(tiny_model()).populate_ahead()
