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
        self.lives: deque[CoreLife] = deque([first.life], maxlen=_HISTORY)

    def new_process(self) -> CoreProcess:
        """A core that is not started yet, with a socket path of its own. Raises StartError."""
        process = CoreProcess(self._next_serial, self._socket_dir)
        self._next_serial += 1
        self.lives.append(process.life)
        return process
