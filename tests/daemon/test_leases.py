import os
import time

import pytest

from preload.daemon import leases
from preload.daemon.errors import BadTicketError, TooManyError
from preload.daemon.generations import Generation, Rank, Recipe
from preload.daemon.leases import Event, LeaseBook


@pytest.fixture
def generation() -> Generation:
    return Generation(1, Recipe("auto", "keep", "float32", "", 1), Rank(), "host")


def test_ticket_works_once(generation: Generation) -> None:
    book = LeaseBook(10)
    lease, ticket = book.grant(generation, 1, "me")
    assert not lease.mapped
    assert book.redeem(ticket) is lease
    assert lease.mapped
    with pytest.raises(BadTicketError):
        book.redeem(ticket)


def test_ticket_dies_with_its_lease(generation: Generation) -> None:
    book = LeaseBook(10)
    lease, ticket = book.grant(generation, 1, "me")
    book.release(lease)
    with pytest.raises(BadTicketError):
        book.redeem(ticket)


def test_expired_ticket_is_refused(generation: Generation) -> None:
    book = LeaseBook(0.0)
    _, ticket = book.grant(generation, 1, "me")
    assert time.monotonic() > 0
    with pytest.raises(BadTicketError, match="expired"):
        book.redeem(ticket)


def test_events_reach_the_holders_of_that_generation_only(generation: Generation) -> None:
    book = LeaseBook(10)
    other = Generation(2, generation.recipe, Rank(), "host")
    lease, _ = book.grant(generation, 1, "me")
    bystander, _ = book.grant(other, 2, "you")
    book.notify(generation, Event.SUPERSEDED, "next")
    assert lease.events.get_nowait() == (Event.SUPERSEDED, "next")
    assert bystander.events.empty()
    assert book.of(other) == [bystander]


def test_another_user_has_half_of_the_leases_that_were_fetched(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who it is, the hand-over tells; its ticket stays good for when it has given one back."""
    monkeypatch.setattr(leases, "MAX_LEASES", 8)
    book = LeaseBook(10)
    theirs = []
    for _ in range(4):
        lease, ticket = book.grant(generation, 1, "greedy")
        book.redeem(ticket, 4242)
        theirs.append(lease)
    one_more, ticket = book.grant(generation, 1, "greedy")
    with pytest.raises(TooManyError, match="user 4242 has 4 leases"):
        book.redeem(ticket, 4242)
    _, other = book.grant(generation, 2, "modest")
    book.redeem(other, 4343)
    book.release(theirs[0])
    assert book.redeem(ticket, 4242) is one_more


def test_our_own_user_may_have_all_leases(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASES", 8)
    book = LeaseBook(10)
    for _ in range(8):
        lease, ticket = book.grant(generation, 1, "me")
        book.redeem(ticket, os.geteuid())
    with pytest.raises(TooManyError, match="8 leases are out"):
        book.grant(generation, 1, "me")
    book.release(lease)
    book.grant(generation, 1, "me")


def test_leases_whose_ticket_expired_unused_make_room_for_others(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest first, and none whose ticket is good still, nor one of the daemon's own."""
    monkeypatch.setattr(leases, "MAX_LEASES", 8)
    book = LeaseBook(3600)
    book.grant(generation, 0, "verify", uid=os.geteuid())
    first, _ = book.grant(generation, 1, "idle")
    second, _ = book.grant(generation, 1, "idle")
    with pytest.raises(TooManyError):
        book.grant(generation, 1, "idle")
    book.revoke_tickets(generation)
    third, _ = book.grant(generation, 2, "new")
    assert first not in book.all()
    assert first.events.get_nowait()[0] is Event.ENDED
    assert second.events.empty()
    assert third in book.all()
