"""KV cache: the pool of blocks, and the tensors they are blocks of.

The pool owns which block is free; a request's block list says which are its own (see Request.block_ids).
Invariants: block 0 is the null block and is never handed out; a block is free or has a reference count of at
least 1, never both; free + referenced + 1 = num_blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from preload.engine.models.spec import ModelSpec

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids and takes them back, least recently freed first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(1, num_blocks))
        self._num_refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks there are for sequences: all but the null block."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None, and nothing allocated, if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each; a block without any is free again."""
        for block in blocks:
            if self._num_refs[block] < 1:
                raise AssertionError(f"block {block} was released more often than it was allocated")
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free.append(block)


class KVCache:
    """Keys and values of every layer: one allocation, dtype[layers, 2, num_blocks, block_size, kv_heads, head_dim].

    The memory is not touched before it is written, so unused blocks cost nothing; what they hold is garbage.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self._storage: Tensor = torch.empty(shape, dtype=dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._storage]

    @property
    def num_bytes(self) -> int:
        return self._storage.numel() * self._storage.element_size()


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return spec.num_layers * 2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
