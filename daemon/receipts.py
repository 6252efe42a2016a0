"""Receipts: whether files on disk are still the ones that were read. Stat only, nothing is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .errors import CheckpointNotFoundError
from .generations import Receipt


def stale(receipts: Sequence[Receipt]) -> list[str]:
    """Paths whose device, inode, size, mtime or ctime differ from the receipt, or that are gone."""
    return [receipt.path for receipt in receipts if not _holds(receipt)]


def _holds(receipt: Receipt) -> bool:
    try:
        seen = os.stat(receipt.path)
    except OSError:
        return False
    return (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns) == (
        receipt.device,
        receipt.inode,
        receipt.size_bytes,
        receipt.mtime_ns,
        receipt.ctime_ns,
    )


def changed(before: Sequence[Receipt], after: Sequence[Receipt]) -> list[str]:
    """Paths whose content digest differs between two readings, or that only one of them saw."""
    old = {receipt.path: receipt.content_digest for receipt in before}
    new = {receipt.path: receipt.content_digest for receipt in after}
    return sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))


def require_path(path: str) -> None:
    """Raises CheckpointNotFoundError, with the system's reason, unless the path can be looked at."""
    try:
        os.stat(path)
    except OSError as error:
        broken = os.path.islink(path)
        what = f"is a broken link to {os.readlink(path)}" if broken else (error.strerror or str(error))
        raise CheckpointNotFoundError(f"checkpoint {path}: {what}", {"path": path}) from error
