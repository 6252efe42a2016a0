"""Leases and tickets: who uses a generation, and the one-time right to fetch its descriptors.

A lease lives exactly as long as its Attach stream; over a restart of the daemon its
holder takes it again with the secret that only it knows. A ticket belongs to one lease, works once, and expires.

Whose a lease is, only the hand-over of its descriptors tells, where the kernel names the user. So one user has at
most half of all by that; and of leases whose ticket was never used, which are nobody's, the oldest make room.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from enum import Enum

from .doors import is_owner
from .errors import BadTicketError, TooManyError
from .generations import Generation, Phase
from .segments import descriptors

MAX_LEASES = 4096
"""Each is a stream, and an entry of the catalog that is written whenever one comes or goes. One process cannot have
them all: see guard.py."""


class Event(Enum):
    """What the daemon tells a lease holder."""

    RETIRING = "retiring"
    SUPERSEDED = "superseded"
    DRAINING = "draining"
    FAILED = "failed"
    """With why. Mappings must not be used any more."""
    ENDED = "ended"
    """With why. The stream must end now."""


@dataclass(eq=False)
class Lease:
    """One holder's right to a generation. `events` carries (event, id of the successor or "")."""

    id: str
    generation: Generation
    pid: int
    client: str
    since_s: float
    mapped: bool = False
    uid: int | None = None
    """Of who fetched its descriptors, as the kernel knows it; our own for our own use."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    unclaimed: bool = False
    revived: bool = False
    """Of an earlier life of the daemon, which need not have noted whether its descriptors were fetched."""
    phases: list[Phase] = field(default_factory=list)
    events: asyncio.Queue[tuple[Event, str]] = field(default_factory=asyncio.Queue)


class LeaseBook:
    """All live leases and their unredeemed tickets."""

    def __init__(self, ticket_ttl_s: float) -> None:
        self.ticket_ttl_s = ticket_ttl_s
        self._leases: dict[str, Lease] = {}
        self._tickets: dict[bytes, tuple[Lease, float]] = {}

    def grant(self, generation: Generation, pid: int, client: str, uid: int | None = None) -> tuple[Lease, bytes]:
        """A new lease and its ticket; `uid` is whose it is, if that is known already. Raises TooManyError."""
        self._drop_expired_tickets()
        self._make_room()
        lease = Lease(secrets.token_hex(8), generation, pid, client, time.monotonic(), uid=uid)
        # Handles are in the answer itself: there is no hand-over to wait for.
        lease.mapped = not descriptors(generation.segments) and bool(generation.segments)
        self._leases[lease.id] = lease
        generation.num_attaches += 1
        return lease, self._issue(lease)

    def _make_room(self) -> None:
        """Ends the oldest lease whose ticket expired unused, if there are too many. Raises TooManyError if there is
        none."""
        unused = [
            lease for lease in self._leases.values() if lease.uid is None and not lease.mapped and not lease.revived
        ]
        if len(self._leases) < MAX_LEASES and len(unused) < MAX_LEASES // 4:
            return
        waiting = {lease.id for lease, _ in self._tickets.values()}
        idle = next((lease for lease in unused if lease.id not in waiting), None)
        if idle is None:
            raise TooManyError(
                f"{len(self._leases)} leases are out, {len(unused)} of them not fetched yet; this daemon gives no "
                "more until one ends or is fetched"
            )
        self.release(idle)
        idle.events.put_nowait((Event.ENDED, "its descriptors were never fetched, and others need the room"))

    def adopt(self, lease: Lease) -> None:
        """Takes in a lease of an earlier life of the daemon, whose holder has yet to come back."""
        lease.revived = True
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

    def redeem(self, ticket: bytes, uid: int = 0) -> Lease:
        """The lease behind a ticket, which is then spent. `uid` is who shows it.

        Raises BadTicketError, and TooManyError if that user has too many leases."""
        self._drop_expired_tickets()
        lease, _ = self._tickets.get(ticket, (None, 0.0))
        if lease is None:
            raise BadTicketError("the ticket is unknown, was used already, or has expired; attach again")
        if not is_owner(uid) and lease.uid != uid:
            count = sum(other.uid == uid for other in self._leases.values())
            if count >= MAX_LEASES // 2:
                raise TooManyError(f"user {uid} has {count} leases, which is all it can have; end one first")
        del self._tickets[ticket]
        lease.mapped, lease.uid = True, uid
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
