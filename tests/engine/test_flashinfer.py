"""FlashInfer behind our operations, without a GPU: what it is told to plan, when, and what is refused.

The package here is one of its own: two wrappers that attend as FlashInfer's documentation says, from nothing but what
was planned.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preload.engine.core import kernels
from preload.engine.core.config import CoreConfig
from preload.engine.core.kernels import ops_on
from preload.engine.core.placement import HostPlacement
from preload.engine.core.process import _build_decoder
from preload.engine.errors import DeviceError, RequestError
from preload.engine.kernels.attention import AttentionBatch, paged_attention
from preload.engine.kernels.flashinfer_plan import pages_of
from preload.engine.layers.ops import Heads

pytest.importorskip("triton")

from preload.engine.layers.flashinfer_ops import FlashInferOps, FlashInferSteps, load_flashinfer

CPU = torch.device("cpu")


class Wrapper:
    """Attends from what was planned; `plans`: how often."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert (layout, workspace.dtype) == ("NHD", torch.uint8)
        self.num_plans = 0

    def _note(
        self, qo_indptr: Any, indptr: Any, indices: Any, last_page_len: Any, *sizes: int, **options: Any
    ) -> None:
        for tensor in (qo_indptr, indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
        assert options["q_data_type"] == options["kv_data_type"] == torch.bfloat16
        self.num_heads, self.num_kv_heads, self.head_dim, self.page_size = sizes
        self.planned = qo_indptr.tolist(), indptr.tolist(), indices.tolist(), last_page_len.tolist()
        self.num_plans += 1

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        starts, indptr, indices, last = self.planned
        out = torch.zeros(query.shape)
        for r in range(len(last)):
            pages = indices[indptr[r] : indptr[r + 1]]
            length = (len(pages) - 1) * self.page_size + last[r]
            keys, values = (part[pages].flatten(0, 1)[:length].float() for part in cache)
            for token in range(starts[r], starts[r + 1]):
                seen = length - (starts[r + 1] - 1 - token)
                for head in range(self.num_heads):
                    of = head // (self.num_heads // self.num_kv_heads)
                    scores = keys[:seen, of] @ query[token, head].float() / math.sqrt(self.head_dim)
                    out[token, head] = scores.softmax(dim=0) @ values[:seen, of]
        return out.to(query.dtype)


class Decode(Wrapper):
    def plan(self, indptr: torch.Tensor, indices: Any, last_page_len: Any, *sizes: int, **options: Any) -> None:
        self._note(torch.arange(len(last_page_len) + 1).int(), indptr, indices, last_page_len, *sizes, **options)


class Prefill(Wrapper):
    def plan(self, *where: Any, causal: bool = False, **options: Any) -> None:
        assert causal
        self._note(*where, **options)


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill, __version__="9.9"
)


def make_batch(shapes: list[tuple[int, int]], page_size: int, width: int, seed: int = 0) -> AttentionBatch:
    """Requests of (tokens before, query tokens), decodes first, on blocks drawn without repetition."""
    generator = torch.Generator().manual_seed(seed)
    shapes = sorted(shapes, key=lambda shape: shape[1] > 1)
    lengths = torch.tensor([before + count for before, count in shapes])
    table = (torch.randperm(len(shapes) * width, generator=generator) + 1).view(len(shapes), width).int()
    starts = torch.tensor([0, *(count for _, count in shapes)]).cumsum(0)
    return AttentionBatch(
        query_start_loc=starts.int(), seq_lens=lengths.int(), block_table=table,
        slot_mapping=torch.full((int(starts[-1]),), -1), num_decodes=sum(count == 1 for _, count in shapes),
    )  # fmt: skip


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    page_size=st.integers(1, 17), seed=st.integers(0, 99), cut=st.integers(0, 5),
)  # fmt: skip
def test_pages_are_those_that_a_naive_look_finds(
    shapes: list[tuple[int, int]], page_size: int, seed: int, cut: int
) -> None:
    width = -(-49 // page_size) + 1
    batch = make_batch(shapes, page_size, width, seed)
    first = min(cut, len(shapes) - 1)
    pages = pages_of(batch, first, len(shapes), page_size)
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    assert pages.qo_indptr.tolist() == [start - starts[first] for start in starts[first:]]
    indptr, indices = pages.indptr.tolist(), pages.indices.tolist()
    assert indptr[0] == 0
    assert indptr[-1] == len(indices)
    for i, r in enumerate(range(first, len(shapes))):
        mine, last = indices[indptr[i] : indptr[i + 1]], int(pages.last_page_len[i])
        assert 1 <= last <= page_size
        slots = [block * page_size + offset for block in mine for offset in range(page_size)]
        expected = [int(batch.block_table[r, p // page_size]) * page_size + p % page_size for p in range(lengths[r])]
        assert slots[: (len(mine) - 1) * page_size + last] == expected


@pytest.mark.parametrize("shapes", [[(20, 1), (0, 1), (7, 1)], [(0, 9), (4, 3)], [(33, 1), (2, 5), (0, 1), (0, 12)]])
def test_attention_is_the_references_and_planned_once_for_all_layers(shapes: list[tuple[int, int]]) -> None:
    heads, page_size = Heads(6, 2, 64), 4
    batch = make_batch(shapes, page_size, 12)
    generator = torch.Generator().manual_seed(1)
    steps = FlashInferSteps(CPU, torch.bfloat16, FLASHINFER)
    for _ in range(3):
        cache = torch.randn(2, 60, page_size, 2, 64, generator=generator).bfloat16()
        query = torch.randn(len(batch.slot_mapping), 6, 64, generator=generator).bfloat16()
        got = steps(heads, query, (cache[0], cache[1]), batch)
        expected = paged_attention(query.float(), cache[0].float(), cache[1].float(), batch)
        torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)
    plans = steps._decode.num_plans, steps._prefill.num_plans
    assert plans == (int(batch.num_decodes > 0), int(batch.num_decodes < len(shapes)))
    steps(heads, query, (cache[0], cache[1]), make_batch(shapes, page_size, 12, seed=5))
    assert steps._decode.num_plans + steps._prefill.num_plans == 2 * sum(plans), "another step, another plan"


def test_what_attends_is_said() -> None:
    text = FlashInferOps(CPU, torch.bfloat16, FLASHINFER).describe()
    assert text == "Triton kernels; attention of eager steps by FlashInfer 9.9"


def test_what_it_has_no_kernels_for_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"bfloat16 or float16, and the compute dtype is torch\.float32"):
        FlashInferOps(CPU, torch.float32, FLASHINFER)
    with pytest.raises(RequestError, match="this model's are of 80"):
        FlashInferOps(CPU, torch.bfloat16, FLASHINFER).attention(Heads(4, 2, 80))


def test_a_refusal_tells_which_model_it_is(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = {"spec": tiny.spec.to_dict(), "compute_dtype": "bfloat16", "model": "llama"}
    tensors = {name: tensor.bfloat16() for name, tensor in tiny.tensors.items()}
    attachment: Any = SimpleNamespace(
        resolved_recipe=resolved, generation_id="g-7", tensors=tensors, layouts=tiny.layouts
    )
    monkeypatch.setattr(
        kernels, "ops_on", lambda placement, folder, dtype, *rest: FlashInferOps(CPU, dtype, FLASHINFER)
    )
    config = CoreConfig(attention_backend="flashinfer")
    for role in ("target", "draft"):
        words = rf"the {role} model \(generation g-7\): attention_backend flashinfer has kernels for heads of 64"
        with pytest.raises(RequestError, match=words):
            _build_decoder(config, attachment, HostPlacement(), role)
    resolved["compute_dtype"] = "float32"
    with pytest.raises(
        RequestError, match=r"the target model \(generation g-7\): .*the compute dtype is torch\.float32"
    ):
        _build_decoder(config, attachment, HostPlacement())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(DeviceError, match=r"flashinfer-python is not installed \(pip install"):
        load_flashinfer()


def test_on_the_host_there_is_no_other_backend() -> None:
    with pytest.raises(RequestError, match="computes on a GPU, and the weights are in host memory"):
        ops_on(HostPlacement(), "", torch.bfloat16, 1, "flashinfer")
    with pytest.raises(RequestError, match="attention_backend is 'cutlass'; it must be triton or flashinfer"):
        CoreConfig(attention_backend="cutlass")
