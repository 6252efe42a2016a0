"""Which mounts a path leads over, each told before it is touched: one of them may hang."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

_MAX_LINKS = 40
_OCTAL = re.compile(rb"\\([0-7]{3})")


def mounts_on_the_way(path: str) -> Iterator[str]:
    """The mount points that a look at `path` enters, in order, each before the path is followed into it.

    Links are followed as the kernel does; a path that leads nowhere ends the way, which is not an error here."""
    points = _mount_points()
    left = _names(path)
    at = entered = ""  # "" is the root
    num_links = 0
    while left:
        name = left.pop()
        below = os.path.dirname(at).rstrip("/") if name == ".." else f"{at}/{name}"
        mount = _mount_of(below, points)
        if mount != entered:
            entered = mount
            yield mount
        try:
            target = os.readlink(below or "/")
        except OSError as error:
            if error.errno != errno.EINVAL:  # which means that it is there, and no link
                return
            at = below
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            return
        at = "" if target.startswith("/") else at
        left += _names(target)


def _names(path: str) -> list[str]:
    """The last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _mount_points() -> frozenset[str]:
    """Of this process's namespace, as the kernel has them; it asks no file system for it."""
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split(b" ", 5)[4] for line in file.read().splitlines()]
    return frozenset(os.fsdecode(_OCTAL.sub(lambda m: bytes([int(m[1], 8)]), field)) for field in fields)


def _mount_of(path: str, points: frozenset[str]) -> str:
    while path and path not in points:
        path = path.rpartition("/")[0]
    return path or "/"
