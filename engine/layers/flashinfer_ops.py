"""Attention by FlashInfer, all else by Triton: an optional backend of a GPU's operations.

FlashInfer plans each step on the host, which no graph can hold. So steps that a graph replays keep Triton's
attention, and eager ones, which are those with prompts, get FlashInfer's: decodes through its decode wrapper, the
others through its prefill wrapper. Plans are made once a step and shared by the layers. Owns the wrappers and their
workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from preload.engine.errors import DeviceError, RequestError
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.flashinfer_plan import pages_of

from .ops import Attention, Heads, LayerCache
from .triton_ops import TritonOps

WORKSPACE_BYTES = 128 << 20
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)


def load_flashinfer() -> Any:
    """The package. Raises DeviceError naming it if it is not installed."""
    try:
        import flashinfer
    except ImportError as error:
        raise DeviceError(
            "attention_backend is flashinfer, and the package flashinfer-python is not installed "
            f"(pip install 'preload-llm[flashinfer]'): {error}"
        ) from error
    return flashinfer


class FlashInferOps(TritonOps):
    """`flashinfer`: the package. Raises RequestError for activations that it has no kernels for."""

    def __init__(self, device: torch.device, dtype: torch.dtype, flashinfer: Any) -> None:
        super().__init__(device, dtype)
        if dtype not in DTYPES:
            raise RequestError(
                f"attention_backend flashinfer computes in bfloat16 or float16, and the compute dtype is {dtype}; "
                "load with another compute dtype, or serve with attention_backend triton"
            )
        self._steps = FlashInferSteps(device, dtype, flashinfer)
        self._version = getattr(flashinfer, "__version__", "?")

    def describe(self) -> str:
        return f"{super().describe()}; attention of eager steps by FlashInfer {self._version}"

    def attention(self, heads: Heads) -> Attention:
        """Raises RequestError for heads that FlashInfer has no kernels for."""
        if heads.head_dim not in HEAD_DIMS:
            raise RequestError(
                f"attention_backend flashinfer has kernels for heads of {', '.join(map(str, HEAD_DIMS))}, and this "
                f"model's are of {heads.head_dim}; serve with attention_backend triton"
            )
        return self._attention(heads, lambda query, cache, batch: self._steps(heads, query, cache, batch))


class FlashInferSteps:
    """Plans of the latest eager step, and the wrappers they are in."""

    def __init__(self, device: torch.device, dtype: torch.dtype, flashinfer: Any) -> None:
        self._device, self._dtype = device, dtype
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # With tensor cores, any number of query heads may share one of keys.
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned: tuple[AttentionBatch, Heads] | None = None
        self._runs: list[tuple[slice, Callable[..., Tensor]]] = []

    def __call__(self, heads: Heads, query: Tensor, cache: LayerCache, batch: AttentionBatch) -> Tensor:
        """dtype[num_tokens, num_heads, head_dim]. query: the same, rotated; keys and values are written already."""
        if self._planned is None or self._planned[0] is not batch or self._planned[1] != heads:
            self._plan(heads, batch, page_size=cache[0].shape[1])
        parts = [run(query[tokens], cache) for tokens, run in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _plan(self, heads: Heads, batch: AttentionBatch, page_size: int) -> None:
        """One look at the device for all layers. The two wrappers share a workspace: a plan keeps nothing in it but
        what a run of it has written before it reads."""
        host = replace(
            batch, query_start_loc=batch.query_start_loc.cpu(), seq_lens=batch.seq_lens.cpu(),
            block_table=batch.block_table.cpu(),
        )  # fmt: skip
        num_reqs, n = host.seq_lens.shape[0], host.num_decodes
        sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim, page_size
        dtypes = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        self._runs = []
        if n:
            pages = pages_of(host, 0, n, page_size)
            indices = pages.indices.to(self._device)
            self._decode.plan(pages.indptr, indices, pages.last_page_len, *sizes, **dtypes)
            self._runs.append((slice(0, n), self._decode.run))
        if n < num_reqs:
            pages = pages_of(host, n, num_reqs, page_size)
            indices = pages.indices.to(self._device)
            where = pages.qo_indptr, pages.indptr, indices, pages.last_page_len
            self._prefill.plan(*where, *sizes, causal=True, **dtypes)
            self._runs.append((slice(n, None), self._prefill.run))
        self._planned = batch, heads
