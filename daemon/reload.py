"""SIGHUP: the configuration is read again, and what can change while the daemon serves is changed.

A configuration that is wrong changes nothing. What only a restart can change is named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields

from .cache import WeightCache
from .config import DaemonConfig
from .doors import Doors
from .errors import BadRequestError
from .generations import Source
from .notify import Notifier

log = logging.getLogger(__name__)

ReadConfig = Callable[[], DaemonConfig]

_CHANGEABLE = frozenset(
    (
        "host_limit",
        "device_limit",
        "allow_uids",
        "allow_gids",
        "ticket_ttl_s",
        "drain_timeout_s",
        "reclaim_timeout_s",
        "loader_threads",
        "models",
    )
)


class Reloader:
    """Applies configurations to a daemon that serves."""

    def __init__(
        self,
        read: ReadConfig,
        cache: WeightCache,
        doors: Doors,
        notifier: Notifier,
        load: Callable[[Source], None],
    ) -> None:
        self._read = read
        self._cache = cache
        self._doors = doors
        self._notifier = notifier
        self._load = load

    def reload(self) -> None:
        """One SIGHUP. Models that are new, or not resident, are loaded in the background."""
        if self._cache.draining:
            return
        self._notifier.reloading()
        status = "serving"
        try:
            self._apply(self._read())
            status = self._doors.trouble() or status
        except BadRequestError as error:
            log.error("the configuration is refused, the old one stays: %s", error.message)
            status = f"the configuration is refused, the old one stays: {error.message}"
        self._notifier.ready(status.replace("\n", " "))

    def _apply(self, wanted: DaemonConfig) -> None:
        current = self._cache.config
        changed = [f.name for f in fields(DaemonConfig) if getattr(wanted, f.name) != getattr(current, f.name)]
        applied = [name for name in changed if name in _CHANGEABLE]
        merged = {f.name: getattr(wanted if f.name in applied else current, f.name) for f in fields(DaemonConfig)}
        self._doors.allow(wanted.allow_uids, wanted.allow_gids)
        try:
            self._cache.reconfigure(DaemonConfig(**merged))
        except BadRequestError:
            self._doors.allow(current.allow_uids, current.allow_gids)
            raise
        for warning in self._cache.config.warnings():
            log.warning("%s", warning)
        log.info("configuration read again; changed: %s", ", ".join(applied) or "nothing")
        for name in changed:
            if name not in _CHANGEABLE:
                log.warning("%s changes with a restart only: ignored", name)
        for source in self._cache.missing_sources():
            self._load(source)
