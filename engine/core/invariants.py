"""What must hold between two steps, whatever requests did: checked after every step in tests, and by a core that has
nothing to do. A violation raises InvariantError, which ends the process: its supervisor starts another, and nobody
gets keys and values of somebody else.

- Every block is free or owned, and has as many references as owners; the null block is neither.
- A request has a row exactly if it runs, and no two have the same one; it has blocks only if it runs or holds them.
- A request is in one queue, queues are in order, and it has blocks for what it has computed.
- A block that is shared, or found by its content, is full, and holds what each of its owners believes.
- What the batch says of a running request's row is what the request says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .batch import PersistentBatch
from .kv_cache import NULL_BLOCK
from .prefix import BlockContent
from .request import Request
from .scheduler import Scheduler


class InvariantError(AssertionError):
    """Raised when the core's bookkeeping contradicts itself; nothing it computes can be trusted any more."""


def check_scheduler(scheduler: Scheduler) -> None:
    """Queues, rows, blocks and contents. Raises InvariantError naming request or block."""
    owners = scheduler.running + scheduler.kv_holding_waiting
    requests = owners + scheduler.waiting
    _demand(len({id(request) for request in requests}) == len(requests), "a request is in two queues")
    for name in ("running", "kv_holding_waiting", "waiting"):
        queue = getattr(scheduler, name)
        _demand(queue == sorted(queue, key=scheduler.order), f"{name} is not in order")
    _check_rows(scheduler)
    for request in owners:
        _check_owner(scheduler, request)
    for request in scheduler.waiting:
        owns = request.block_ids or request.num_computed_tokens or request.row >= 0
        _demand(not owns, f"{request.request_id} waits and owns blocks or a row")
    _check_blocks(scheduler, owners)


def check_batch(batch: PersistentBatch, running: Iterable[Request]) -> None:
    """The rows of running requests, of which every write has been applied. Raises InvariantError."""
    for request in running:
        row, blocks = request.row, request.block_ids
        found = batch.block_table[row, : len(blocks)].tolist()
        _demand(found == blocks, f"{request.request_id} owns the blocks {blocks}, its row says {found}")
        computed = int(batch.num_computed_tokens[row])
        _demand(
            computed == request.num_computed_tokens,
            f"{request.request_id} has computed {request.num_computed_tokens} tokens, its row says {computed}",
        )
        tokens = batch.token_ids[row, : request.num_tokens].tolist()
        _demand(tokens == request.token_ids(), f"{request.request_id} and its row differ in their tokens")


def _check_rows(scheduler: Scheduler) -> None:
    rows = [request.row for request in scheduler.running] + scheduler.free_rows
    _demand(sorted(rows) == list(range(len(rows))), f"rows {sorted(rows)} are not each free or of one request")
    _demand(len(scheduler.running) <= scheduler.max_num_active_seqs, "more requests run than may be active")
    _demand(all(request.row < 0 for request in scheduler.kv_holding_waiting), "a request that waits has a row")


def _check_owner(scheduler: Scheduler, request: Request) -> None:
    name, size = request.request_id, scheduler.pool.block_size
    computed, blocks = request.num_computed_tokens, request.block_ids
    _demand(bool(blocks), f"{name} runs or holds without blocks")
    _demand(len(set(blocks)) == len(blocks) and NULL_BLOCK not in blocks, f"{name} owns {blocks}")
    _demand(computed <= len(blocks) * size, f"{name} has computed {computed} tokens in {len(blocks)} blocks")
    _demand(computed < request.num_tokens, f"{name} has computed {computed} of {request.num_tokens} tokens")


def _check_blocks(scheduler: Scheduler, owners: list[Request]) -> None:
    pool = scheduler.pool
    references = Counter(block for request in owners for block in request.block_ids)
    contents: dict[int, BlockContent] = {}
    for request in owners:
        num_full = request.num_computed_tokens // pool.block_size
        for index, block in enumerate(request.block_ids):
            if index >= num_full:
                _demand(references[block] == 1, f"block {block} of {request.request_id} is shared and not computed")
                _demand(not pool.is_cached(block), f"block {block} is found by a content that is not computed")
            elif scheduler.prefix_caching:
                content = request.block_contents[index]
                known = contents.setdefault(block, content)
                _demand(known == content, f"owners of block {block} believe it to hold different tokens")
    try:
        pool.check(references, contents)
    except AssertionError as error:
        raise InvariantError(str(error)) from error


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantError(otherwise)
