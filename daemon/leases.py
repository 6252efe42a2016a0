"""Leases and tickets: who uses a generation, and the one-time right to fetch its descriptors.

A lease lives exactly as long as its Attach stream; over a restart of the daemon its
holder takes it again with the secret that only it knows. A ticket belongs to one lease, works once, and expires.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from enum import Enum

from .errors import BadTicketError, TooManyError
from .generations import Generation, Phase

MAX_LEASES = 4096
"""Each is a stream, and an entry of the catalog that is written whenever one comes or goes. One process cannot have
them all: see guard.py."""


class Event(Enum):
    """What the daemon tells a lease holder."""

    RETIRING = "retiring"
    SUPERSEDED = "superseded"
    DRAINING = "draining"


@dataclass(eq=False)
class Lease:
    """One holder's right to a generation. `events` carries (event, id of the successor or "")."""

    id: str
    generation: Generation
    pid: int
    client: str
    since_s: float
    mapped: bool = False
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    unclaimed: bool = False
    phases: list[Phase] = field(default_factory=list)
    events: asyncio.Queue[tuple[Event, str]] = field(default_factory=asyncio.Queue)


class LeaseBook:
    """All live leases and their unredeemed tickets."""

    def __init__(self, ticket_ttl_s: float) -> None:
        self.ticket_ttl_s = ticket_ttl_s
        self._leases: dict[str, Lease] = {}
        self._tickets: dict[bytes, tuple[Lease, float]] = {}

    def grant(self, generation: Generation, pid: int, client: str) -> tuple[Lease, bytes]:
        """A new lease and its ticket. Raises TooManyError."""
        if len(self._leases) >= MAX_LEASES:
            raise TooManyError(f"{MAX_LEASES} leases are out; this daemon gives no more until one ends")
        self._drop_expired_tickets()
        lease = Lease(secrets.token_hex(8), generation, pid, client, time.monotonic())
        self._leases[lease.id] = lease
        generation.num_attaches += 1
        return lease, self._issue(lease)

    def adopt(self, lease: Lease) -> None:
        """Takes in a lease of an earlier life of the daemon, whose holder has yet to come back."""
        self._leases[lease.id] = lease

    def claim(self, secret: bytes, pid: int, client: str) -> tuple[Lease, bytes] | None:
        """The unclaimed lease with this secret, which has its holder again, and a new ticket; None if unknown."""
        for lease in self._leases.values():
            if lease.unclaimed and secrets.compare_digest(lease.secret, secret):
                lease.unclaimed, lease.pid, lease.client = False, pid, client
                return lease, self._issue(lease)
        return None

    def _issue(self, lease: Lease) -> bytes:
        ticket = secrets.token_bytes(32)
        self._tickets[ticket] = (lease, time.monotonic() + self.ticket_ttl_s)
        return ticket

    def redeem(self, ticket: bytes) -> Lease:
        """The lease behind a ticket, which is then spent. Raises BadTicketError."""
        self._drop_expired_tickets()
        lease, _ = self._tickets.pop(ticket, (None, 0.0))
        if lease is None:
            raise BadTicketError("the ticket is unknown, was used already, or has expired; attach again")
        lease.mapped = True
        return lease

    def release(self, lease: Lease) -> None:
        self._leases.pop(lease.id, None)
        self._tickets = {t: v for t, v in self._tickets.items() if v[0] is not lease}

    def revoke_tickets(self, generation: Generation) -> None:
        """From now on nobody maps it; who does already keeps its lease."""
        self._tickets = {t: v for t, v in self._tickets.items() if v[0].generation is not generation}

    def of(self, generation: Generation) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.generation is generation]

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def notify(self, generation: Generation, event: Event, successor: str = "") -> None:
        for lease in self.of(generation):
            lease.events.put_nowait((event, successor))

    def _drop_expired_tickets(self) -> None:
        now = time.monotonic()
        self._tickets = {t: v for t, v in self._tickets.items() if v[1] > now}
