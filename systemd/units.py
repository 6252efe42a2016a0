"""Unit files for systemd: templates beside this module, filled in for one installation.

Owns which file goes where. `@PRELOAD@` stands for the command and `@USER@` for the system user; nothing else is
replaced. Configuration that exists is never overwritten, units are: local changes belong into drop-ins.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

UNITS = "etc/systemd/system"
_PLACES = {
    "preload.service": f"{UNITS}/preload.service",
    "preload-holder@.service": f"{UNITS}/preload-holder@.service",
    "preload-template.service": f"{UNITS}/preload-template.service",
    "preload-engine@.service": f"{UNITS}/preload-engine@.service",
    "preload-engine@.socket": f"{UNITS}/preload-engine@.socket",
    "sysusers.conf": "etc/sysusers.d/preload.conf",
    "tmpfiles.conf": "etc/tmpfiles.d/preload.conf",
}
_STORE = ("preload-descriptor-store.conf", f"{UNITS}/preload.service.d/descriptor-store.conf")
_CONFIGURATION = ("daemon.toml", "etc/preload/daemon.toml")
PRESERVING_VERSION = 254
"""The first systemd that knows FileDescriptorStorePreserve=; an older one would warn at every start."""
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")


class UnitError(Exception):
    """Raised when units cannot be written as told; the caller should correct the option that the message names."""


@dataclass(frozen=True)
class Written:
    """What was written, and what was there already and left alone."""

    paths: list[Path]
    kept: list[Path]


def write_units(prefix: Path, command: str, user: str, systemd_version: int) -> Written:
    """Writes everything under `prefix`. `command` is a path to `preload`, or the words that run it.

    Raises UnitError, OSError."""
    if not _USER.fullmatch(user):
        raise UnitError(f"--user {user!r} is no name for a system user")
    places = dict(_PLACES)
    if systemd_version >= PRESERVING_VERSION:
        places[_STORE[0]] = _STORE[1]
    else:
        (prefix / _STORE[1]).unlink(missing_ok=True)
    written = Written([], [])
    for name, place in places.items():
        text = _template(name).replace("@PRELOAD@", command).replace("@USER@", user)
        written.paths.append(_write(prefix / place, text))
    configuration = prefix / _CONFIGURATION[1]
    if configuration.exists():
        written.kept.append(configuration)
    else:
        written.paths.append(_write(configuration, _template(_CONFIGURATION[0])))
    (prefix / "etc/preload/engines").mkdir(mode=0o755, parents=True, exist_ok=True)
    return written


def quoted_command(words: list[str]) -> str:
    """Words of a command as ExecStart= reads them. Raises UnitError on a path that it cannot hold."""
    for word in words:
        if not word.isprintable() or '"' in word or "\\" in word:
            raise UnitError(f"systemd cannot start a command with the path {word!r}")
    escaped = [word.replace("%", "%%").replace("$", "$$") for word in words]
    return " ".join(f'"{word}"' if re.search(r"[\s';]", word) else word for word in escaped)


def _template(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> Path:
    """Whole or not at all: systemd may read it at any time."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o644)
    os.replace(new, path)
    return path
