"""The block pool: what is handed out, what is found again by its content, and what is given up first."""

from __future__ import annotations

import pytest

from preload.engine.core.kv_cache import BlockPool
from preload.engine.core.prefix import BlockContent, content_after, root

SIZE = 4


def chain(*blocks: list[int], salt: str = "") -> list[BlockContent]:
    contents, parent = [], root(salt)
    for tokens in blocks:
        contents.append(content_after(parent, tokens))
        parent = contents[-1].hash
    return contents


def filled(pool: BlockPool, contents: list[BlockContent]) -> list[int]:
    """New blocks that hold a chain."""
    blocks = pool.allocate(len(contents))
    assert blocks is not None
    for block, content in zip(blocks, contents, strict=True):
        pool.publish(block, content)
    return blocks


A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]


def test_a_pool_gives_all_or_nothing_and_notices_a_double_release() -> None:
    pool = BlockPool(4, SIZE)
    assert pool.allocate(4) is None
    blocks = pool.allocate(3)
    assert blocks is not None
    assert sorted(blocks) == [1, 2, 3]
    assert pool.allocate(1) is None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks[:1])


def test_the_same_tokens_after_others_or_under_another_salt_are_another_content() -> None:
    hashes = {c.hash for c in (*chain(A, B), *chain(B, A), *chain(A, salt="x"), *chain(C, B))}
    assert len(hashes) == 7
    assert chain(A, B) == chain(list(A), list(B))


def test_a_released_chain_is_found_from_its_beginning_until_its_blocks_are_handed_out() -> None:
    pool = BlockPool(6, SIZE)
    blocks = filled(pool, chain(A, B, C))
    pool.release(blocks)
    assert pool.num_free == 5
    assert pool.match(chain(A, B, C, A)) == blocks
    assert pool.match(chain(A, C)) == blocks[:1]
    assert pool.match(chain(B)) == []
    taken = pool.allocate(3)  # two that hold nothing, and the end of the chain
    assert taken is not None
    assert taken[2] == blocks[2]
    assert pool.match(chain(A, B, C)) == blocks[:2]


def test_what_was_used_last_is_given_up_last() -> None:
    pool = BlockPool(5, SIZE)
    old, new = filled(pool, chain(A, B)), filled(pool, chain(C, A))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(0, pool.match(chain(A))) == []  # somebody uses the older one's beginning again
    pool.release(old[:1])
    assert pool.allocate(3) == [old[1], new[1], new[0]]
    assert pool.match(chain(A)) == old[:1]


def test_shared_blocks_are_free_when_the_last_owner_lets_go() -> None:
    pool = BlockPool(4, SIZE)
    blocks = filled(pool, chain(A, B))
    more = pool.allocate(1, blocks)
    assert more is not None
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks + more)
    assert pool.num_free == 3


def test_blocks_that_are_found_count_as_taken_when_they_are_free() -> None:
    pool = BlockPool(4, SIZE)
    blocks = filled(pool, chain(A, B))
    pool.release(blocks)
    assert pool.allocate(2, blocks) is None
    assert pool.num_free == 3
    assert pool.allocate(1, blocks) == [3]


def test_one_block_is_found_where_two_hold_the_same() -> None:
    pool = BlockPool(4, SIZE)
    first, second = filled(pool, chain(A)), filled(pool, chain(A))
    pool.release(second)
    assert pool.match(chain(A)) == first
    assert pool.allocate(2) == [*second, 3]  # what is found nowhere goes first
    pool.check({1: 1, 2: 1, 3: 1}, {1: chain(A)[0], 2: chain(A)[0]})


def test_a_hash_alone_is_no_hit() -> None:
    pool = BlockPool(4, SIZE)
    filled(pool, chain(A))
    forged = BlockContent(chain(A)[0].hash, chain(B)[0].token_ids)
    assert pool.match([forged]) == []


def test_a_pool_that_disagrees_with_its_owners_says_where() -> None:
    pool = BlockPool(4, SIZE)
    blocks = filled(pool, chain(A, B))
    pool.check({1: 1, 2: 1}, {})
    with pytest.raises(AssertionError, match="block 2 has 1 references and 2 owners"):
        pool.check({1: 1, 2: 2}, {})
    with pytest.raises(AssertionError, match="block 1 is found by another content"):
        pool.check({1: 1, 2: 1}, {1: chain(B)[0]})
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 1 has 0 references and 1 owners"):
        pool.check({1: 1}, {})
