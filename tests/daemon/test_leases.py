import time

import pytest

from preload.daemon.errors import BadTicketError
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
