"""The checker of the core's bookkeeping: each kind of damage is found, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from preload.engine.core.core import EngineCore
from preload.engine.core.invariants import InvariantError
from preload.engine.core.prefix import content_after


def _share_a_block(core: EngineCore) -> None:
    a, b = core.scheduler.running
    b.block_ids[-1] = a.block_ids[-1]


def _forget_a_block(core: EngineCore) -> None:
    core.scheduler.running[0].block_ids.pop()


def _use_a_row_twice(core: EngineCore) -> None:
    core.scheduler.running[1].row = core.scheduler.running[0].row


def _leave_a_row(core: EngineCore) -> None:
    core.scheduler.free_rows.pop()


def _queue_twice(core: EngineCore) -> None:
    core.scheduler.waiting.append(core.scheduler.running[0])


def _reverse(core: EngineCore) -> None:
    core.scheduler.running.reverse()


def _claim_other_tokens(core: EngineCore) -> None:
    core.scheduler.running[0].block_contents[0] = content_after(b"", [1, 2, 3, 4])


def _claim_too_much(core: EngineCore) -> None:
    core.scheduler.running[0].num_computed_tokens += 1


def _write_another_block(core: EngineCore) -> None:
    core.runner.batch.block_table[core.scheduler.running[0].row, 0] += 1


def _write_another_token(core: EngineCore) -> None:
    core.runner.batch.token_ids[core.scheduler.running[1].row, 2] += 1


def _publish_too_early(core: EngineCore) -> None:
    core.scheduler.pool.publish(core.scheduler.running[0].block_ids[-1], content_after(b"", [9]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_share_a_block, "is shared and not computed"),
        (_forget_a_block, "a has computed 9 tokens in 2 blocks"),
        (_use_a_row_twice, "rows .* are not each free or of one request"),
        (_leave_a_row, "rows .* are not each free or of one request"),
        (_queue_twice, "a request is in two queues"),
        (_reverse, "running is not in order"),
        (_claim_other_tokens, "block 1 is found by another content"),
        (_claim_too_much, "a has computed 10 of 10 tokens"),
        (_write_another_block, r"a owns the blocks \[1, 2, 3\], its row says \[2, 2, 3\]"),
        (_write_another_token, "b and its row differ in their tokens"),
        (_publish_too_early, "block 3 is found by a content that is not computed"),
    ],
)
def test_damage_is_found_and_named(
    tiny: Any, make_core: Any, make_request: Any, damage: Callable[[EngineCore], None], message: str
) -> None:
    core = make_core(tiny)
    for name in ("a", "b"):
        core.add_request(make_request(name, [ord(name) - 90] * 9))
    core.step()
    core.check_invariants()
    damage(core)
    with pytest.raises(InvariantError, match=message):
        core.check_invariants()
