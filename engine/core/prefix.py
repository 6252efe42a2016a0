"""What a full KV block holds, as a chain of hashes: equal chains mean equal tokens from the first one on.

    root(salt)  = blake2b(salt), a digest of 16 bytes, personalized so that it is no block's
    hash(block) = blake2b(hash of the block before it, or the root ‖ its token ids, 4 bytes each)

Keys and values of a block depend on all tokens before it, which is why its hash does. The hash is a cryptographic
one because prompts come from strangers: with a weak one somebody could make a prompt that is given the keys and
values of another's. A salt keeps users apart who must not learn, by timing, what others asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Of one full block: its hash in the chain, and its tokens, which are compared when the hash is found."""

    hash: bytes
    token_ids: bytes
    """int32 in the machine's order."""


def root(salt: str) -> bytes:
    """Where the chain of a request with this salt begins."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"preload-salt").digest()


def content_after(parent: bytes, token_ids: Sequence[int]) -> BlockContent:
    """The content of a block whose predecessor has the hash `parent`, a root for the first one."""
    packed = array("i", token_ids).tobytes()
    return BlockContent(blake2b(parent + packed, digest_size=HASH_BYTES).digest(), packed)
