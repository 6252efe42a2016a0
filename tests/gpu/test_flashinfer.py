"""FlashInfer on a real GPU, where it is installed: it attends as the reference does, in every shape of a step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flashinfer", reason="the package flashinfer-python is not installed")

from preload.bench.kernel_cases import make_batch, rand
from preload.engine.kernels.attention import paged_attention
from preload.engine.layers.flashinfer_ops import FlashInferSteps
from preload.engine.layers.ops import Heads

SHAPES = {
    "decode": [(15, 1), (300, 1), (63, 1)],
    "prefill": [(0, 70), (33, 5)],
    "mixed": [(40, 1), (9, 33), (130, 40)],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(8, 1, 128)])
@pytest.mark.parametrize("kind", SHAPES)
def test_attention_is_the_references(gpu: str, kind: str, heads: Heads, dtype: torch.dtype) -> None:
    """Within what bfloat16's eight bits leave of sums of values of size 1."""
    import flashinfer

    with torch.device(gpu):
        keys, values, batch = make_batch(SHAPES[kind], 16, heads.num_kv_heads, heads.head_dim, dtype)
        keys, values = (
            keys.nan_to_num(0.0),
            values.nan_to_num(0.0),
        )  # only our own kernels promise never to look there
        query = rand(int(batch.query_start_loc[-1]), heads.num_heads, heads.head_dim, dtype=dtype)
        steps = FlashInferSteps(torch.device(gpu), dtype, flashinfer)
        for _ in range(2):
            got = steps(heads, query, (keys, values), batch)
        expected = paged_attention(query.float(), keys.float(), values.float(), batch)
    torch.testing.assert_close(got.float(), expected, atol=3e-2, rtol=3e-2)
