"""`Admission`: how many sequences are in flight, how many wait, and who is turned away.

First come, first served; a request waits for all the places it needs at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import BadRequestError, OverloadedError
from .metrics import Metrics


class Admission:
    """Places for sequences. Used from one event loop."""

    def __init__(self, max_running: int, max_waiting: int, metrics: Metrics) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._num_running = 0
        self._num_waiting = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_places: int) -> None:
        """Takes places, waiting for them if need be.

        Raises BadRequestError when so many can never be had, OverloadedError when the queue is full.
        """
        if num_places > self._max_running:
            raise BadRequestError(
                f"the request asks for {num_places} completions; at most {self._max_running} may be in flight",
                param="n",
                code="out_of_range",
            )
        if not self._queue and self._num_running + num_places <= self._max_running:
            self._num_running += num_places
            return
        self._check_room(num_places)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((num_places, place))
        self._set_waiting(self._num_waiting + num_places)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(num_places)
            else:
                self._queue.remove((num_places, place))
                self._set_waiting(self._num_waiting - num_places)
                self._admit()
            raise

    @contextmanager
    def outside(self) -> Iterator[None]:
        """As long as its body runs, a request that does not know yet how many places it needs waits as one. Raises
        OverloadedError when the queue is full."""
        self._check_room(1)
        self._set_waiting(self._num_waiting + 1)
        try:
            yield
        finally:
            self._set_waiting(self._num_waiting - 1)

    def _check_room(self, num_places: int) -> None:
        if self._num_waiting + num_places > self._max_waiting:
            raise OverloadedError("too many requests are waiting already; try again later", code="overloaded")

    def release(self, num_places: int) -> None:
        """Gives places back."""
        self._num_running -= num_places
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._num_running + self._queue[0][0] <= self._max_running:
            num_places, place = self._queue.popleft()
            self._set_waiting(self._num_waiting - num_places)
            self._num_running += num_places
            place.set_result(None)

    def _set_waiting(self, count: int) -> None:
        self._num_waiting = count
        self._metrics.queued.set(count)
