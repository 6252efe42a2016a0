"""`CoreRecords`: the cores there have been, of every deployment, oldest first, and the numbers of those to come."""

from __future__ import annotations

from collections import deque

from .core_process import CoreLife, CoreProcess

_HISTORY = 64


class CoreRecords:
    """One per frontend. `first` is the process that was started before anything else."""

    def __init__(self, socket_dir: str, first: CoreProcess) -> None:
        self._socket_dir = socket_dir
        self._next_serial = first.life.serial + 1
        self._may_fork = True
        self.lives: deque[CoreLife] = deque([first.life], maxlen=_HISTORY)

    def new_process(self) -> CoreProcess:
        """A core that is not started yet, with a socket path of its own. Raises StartError.

        After a forked one that was never ready it is a process of its own: a fork may be what cannot live here."""
        process = CoreProcess(self._next_serial, self._socket_dir, may_fork=self._may_fork)
        self._may_fork = True
        self._next_serial += 1
        self.lives.append(process.life)
        return process

    def note_unready(self, life: CoreLife) -> None:
        """A core came to nothing before it was ready."""
        if life.is_forked:
            self._may_fork = False
