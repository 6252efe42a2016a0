"""KV cache: the pool of blocks, and the tensors they are blocks of.

The pool owns which block is free, and which content is found where; a request's block list says which blocks are its
own (see Request.block_ids). A block that is released keeps its content until it is handed out again, so that a later
request with the same prefix can share it.

Invariants: block 0 is the null block and is never handed out; a block is free or has a reference count of at
least 1, never both; free + referenced + 1 = num_blocks; a content is found in at most one block; blocks without
content are handed out first, then those least recently released, and of one sequence its end before its beginning,
so that what is left of a prefix is always its beginning.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from preload.engine.huge_pages import populate, private_memory
from preload.engine.models.spec import ModelSpec

from .prefix import BlockContent

NULL_BLOCK = 0

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""(shape, dtype) → memory that is not initialized, in an order of its own"""


class BlockPool:
    """Hands out block ids, takes them back, and finds them again by what they hold."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_reached = 1
        """Blocks that lie before the first one that nobody has had yet."""
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_refs = [0] * num_blocks
        self._contents: dict[int, BlockContent] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks there are for sequences: all but the null block."""
        return self.num_blocks - 1

    def is_referenced(self, block: int) -> bool:
        return self._num_refs[block] > 0

    def is_cached(self, block: int) -> bool:
        """Whether the block is found by its content."""
        return block in self._contents

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, contents: Iterable[BlockContent]) -> list[int]:
        """The blocks that hold the longest beginning of `contents`, which is a chain. No reference is taken."""
        blocks = []
        for content in contents:
            block = self._block_of.get(content.hash)
            if block is None or self._contents[block].token_ids != content.token_ids:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """`count` blocks with one reference each, and one more reference of each block in `shared`.

        None, and nothing is changed, if there are not enough. Returns the new blocks alone."""
        if count + sum(not self.is_referenced(block) for block in shared) > len(self._free):
            return None
        for block in shared:
            if not self._num_refs[block]:
                del self._free[block]
            self._num_refs[block] += 1
        return [self._take_free() for _ in range(count)]

    def publish(self, block: int, content: BlockContent) -> None:
        """From now on the block is found by its content, unless another one with the same is already."""
        if self._num_refs[block] < 1:
            raise AssertionError(f"block {block} got a content while it is free")
        if content.hash not in self._block_of:
            self._contents[block] = content
            self._block_of[content.hash] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each; a block without any is free again. In a sequence's order."""
        for block in reversed(blocks):
            if self._num_refs[block] < 1:
                raise AssertionError(f"block {block} was released more often than it was allocated")
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free[block] = None
                if block not in self._contents:
                    self._free.move_to_end(block, last=False)

    def _take_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._num_refs[block] = 1
        self.num_reached = max(self.num_reached, block + 1)
        content = self._contents.pop(block, None)
        if content is not None:
            del self._block_of[content.hash]
        return block

    def check(self, references: Mapping[int, int], contents: Mapping[int, BlockContent]) -> None:
        """Raises AssertionError if the pool disagrees with itself or with its owners.

        references: block → how many requests own it; contents: block → what its owners know it to hold."""
        for block in range(self.num_blocks):
            found, expected = self._num_refs[block], references.get(block, 0)
            if found != expected:
                raise AssertionError(f"block {block} has {found} references and {expected} owners")
            if (block in self._free) == (found > 0 or block == NULL_BLOCK):
                raise AssertionError(f"block {block} is free and referenced, or neither")
        if len(self._free) + len(references) + 1 != self.num_blocks:
            raise AssertionError(f"{len(self._free)} free and {len(references)} owned of {self.num_blocks} blocks")
        if {content.hash: block for block, content in self._contents.items()} != self._block_of:
            raise AssertionError("contents and the blocks they are found in do not match")
        for block, content in contents.items():
            if self._contents.get(block, content) != content:
                raise AssertionError(f"block {block} is found by another content than its owner's")


class KVCache:
    """Keys and values of every layer: one allocation, dtype[layers, 2, num_blocks, block_size, kv_heads, head_dim].

    Within a block, the order is that of whichever kernels write and read it. The memory is not touched before it is
    written, or populated, so blocks that are never used cost nothing; what they hold is garbage.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, empty: Empty | None = None
    ) -> None:
        """`empty` allocates it somewhere else than on the host."""
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self._storage = (empty or empty_on_host)(shape, dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._storage]

    @property
    def num_bytes(self) -> int:
        return self._storage.numel() * self._storage.element_size()

    def populate(self, first: int, count: int) -> bool:
        """Has memory found for blocks of a cache on the host. False where the kernel does not."""
        block_bytes = self.num_bytes // self.num_blocks
        return populate(self._storage.data_ptr() + first * block_bytes, count * block_bytes)


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for keys and values, [layers, 2, num_blocks, …], not initialized.

    In huge pages, and all layers of a block side by side: a sequence takes a few of them."""
    layers, parts, num_blocks, *block = shape
    num_bytes = max(1, math.prod(shape) * dtype.itemsize)
    storage = torch.frombuffer(private_memory(num_bytes), dtype=dtype, count=math.prod(shape))
    return storage.view(num_blocks, layers, parts, *block).movedim(0, 2)


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return spec.num_layers * 2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
