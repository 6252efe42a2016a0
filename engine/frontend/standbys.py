"""`Standbys`: a number of warm cores that wait to be promoted, each replaced when it is taken or dies.

Owns them from their start until `take`. A standby's death disturbs nobody: it is replaced quietly, after a growing
pause if that goes on. None is started while `hold` is on: a start takes a CPU for a while, which a takeover needs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from .backoff import Backoff
from .errors import StartError
from .managed_core import ManagedCore

StartStandby = Callable[[], Awaitable[ManagedCore]]
_RETRY_S = 5.0


class _Place:
    """One standby. `taken` is set by whoever takes it."""

    def __init__(self, core: ManagedCore) -> None:
        self.core = core
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.taken = asyncio.Event()


class Standbys:
    """`size` standbys, kept up by `run`. Used from one event loop."""

    def __init__(self, size: int, start: StartStandby, *, ready_timeout_s: float, step_timeout_s: float) -> None:
        self._size = size
        self._start = start
        self._ready_timeout_s = ready_timeout_s
        self._step_timeout_s = step_timeout_s
        self._places: list[_Place] = []
        self._free_to_start = asyncio.Event()

    @property
    def num_warm(self) -> int:
        return sum(place.core.is_open for place in self._places)

    def hold(self) -> None:
        """Starts none until `release`; those that there are stay."""
        self._free_to_start.clear()

    def release(self) -> None:
        self._free_to_start.set()

    async def run(self) -> None:
        """Keeps the standbys up until it is cancelled; kills those that are left then."""
        keepers = [asyncio.create_task(self._keep_one()) for _ in range(self._size)]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def take(self) -> ManagedCore | None:
        """A warm standby, or else the one that will be first; None if there is none. It is the caller's then."""
        while self._places:
            place = next((place for place in self._places if place.core.is_open), self._places[0])
            self._places.remove(place)
            place.taken.set()
            with contextlib.suppress(StartError):
                await place.opened
                return place.core
        return None

    async def _keep_one(self) -> None:
        backoff = Backoff()
        while True:
            await self._free_to_start.wait()
            try:
                place = _Place(await self._start())
            except StartError:
                await asyncio.sleep(_RETRY_S)  # no process, for want of memory or descriptors: that may pass
                continue
            self._places.append(place)
            try:
                why = await self._until_taken_or_over(place)
            except BaseException:
                if not (place.taken.is_set() and place.opened.done()):
                    self._places = [other for other in self._places if other is not place]
                    await place.core.bury()
                raise
            if why is not None:
                self._places = [other for other in self._places if other is not place]
                await place.core.bury(why)
                await asyncio.sleep(backoff.after(place.core.life))

    async def _until_taken_or_over(self, place: _Place) -> str | None:
        """Why the standby is of no use any more; None when it was taken, warm."""
        try:
            await place.core.open(self._ready_timeout_s)
        except StartError as error:
            place.opened.set_exception(error)
            place.opened.exception()  # seen, also if nobody waits for it
            return str(error)
        place.opened.set_result(None)
        taken = asyncio.create_task(place.taken.wait())
        over = asyncio.create_task(place.core.wait_over(self._step_timeout_s))
        try:
            await asyncio.wait((taken, over), return_when=asyncio.FIRST_COMPLETED)
            return None if place.taken.is_set() else over.result()
        finally:
            taken.cancel()
            over.cancel()
            await asyncio.gather(taken, over, return_exceptions=True)
