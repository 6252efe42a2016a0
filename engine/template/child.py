"""What a forked core does before it is one: a process as fresh as one that was started by a command.

Session, descriptors, signals, environment and randomness of its own; and the tie to its frontend, which is not its
parent. It does not die with the template.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import random
import select
import signal
import sys
from dataclasses import dataclass

from preload.protos import template_pb2 as pb

_PR_SET_NAME = 15


@dataclass(frozen=True)
class ForkedCore:
    """What the child of a fork is to become. `fds`: output pipe, liveness pipe."""

    request: pb.ForkRequest
    fds: tuple[int, int]
    frontend_pid: int


def become(core: ForkedCore) -> None:
    """Turns the fork of a template into a core's process. Every signal is blocked when it is called."""
    output, liveness = core.fds
    os.setsid()
    _reset_signals()
    liveness = _take_stdio(output, liveness)
    _close_from(liveness + 1)
    die_with_frontend(liveness)
    _take_environment(core)
    _reset_logging()
    _reseed()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"preload-core", 0, 0, 0)


def die_with_frontend(liveness: int) -> None:
    """Has the kernel kill this process when the last writing end of the pipe is closed; at once if that has been."""
    fcntl.fcntl(liveness, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(liveness, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(liveness, fcntl.F_SETFL, fcntl.fcntl(liveness, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(liveness, 0)  # a hang-up is reported always
    if poller.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)


def _reset_signals() -> None:
    """As Python leaves them at its start; what the template's starter ignores (nohup, a shell's &) counts as well."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_stdio(output: int, liveness: int) -> int:
    """/dev/null and the output pipe to 0, 1 and 2, the liveness pipe to 3, which it returns."""
    null = os.open("/dev/null", os.O_RDONLY)
    # First all of them out of the way: they may lie on each other's places.
    null, output, liveness = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (null, output, liveness))
    for place, fd in ((0, null), (1, output), (2, output)):
        os.dup2(fd, place)
    os.dup2(liveness, 3, inheritable=False)
    return 3


def _close_from(first: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= first:
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone already
                os.close(int(name))


def _take_environment(core: ForkedCore) -> None:
    os.environ.clear()
    os.environb.update(entry.split(b"=", 1) for entry in core.request.environment)  # type: ignore[misc]
    os.chdir(core.request.working_directory)
    # The template's own search path was made of the environment of whoever started it.
    python_path = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [entry for entry in python_path if entry not in sys.path]
    with contextlib.suppress(ProcessLookupError):  # its frontend is dying, and takes this process along
        os.sched_setaffinity(0, os.sched_getaffinity(core.frontend_pid))


def _reset_logging() -> None:
    """To what it is before anybody configures it: warnings, as they are, on stderr."""
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def _reseed() -> None:
    """Forks must not draw the same random numbers. Nothing that is served depends on these generators."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.default_generator.seed()  # not torch.seed(), which looks for devices
