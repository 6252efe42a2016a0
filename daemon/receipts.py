"""Receipts: whether files on disk are still the ones that were read. Stat only, nothing is opened.

A receipt is good against everything that changes a file's times, and its change time cannot be set back: writes,
stores through mappings (the loader has a file's dirty pages written out before it reads), replaced files, links
that point elsewhere, and names that come or go in a checkpoint's folder. It is not good against what changes no time:

- Files that lie in memory (tmpfs, ramfs, hugetlbfs) show no store through a mapping. Their receipts say so, and such
  files are hashed at every attach; beneath an overlay file system they are not recognized.
- A file server may tell this host of another's writes late (NFS: after its attribute cache's timeout).
- Whoever writes to the disk itself, behind the file system, or sets the host's clock back, is not seen.
"""

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
    return _state(receipt) == (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def _state(receipt: Receipt) -> tuple[int, int, int, int, int]:
    return receipt.device, receipt.inode, receipt.size_bytes, receipt.mtime_ns, receipt.ctime_ns


def blind(receipts: Sequence[Receipt]) -> list[str]:
    """Paths of which no stat proves anything: only their content does."""
    return [receipt.path for receipt in receipts if receipt.stat_blind]


def changed(before: Sequence[Receipt], after: Sequence[Receipt]) -> list[str]:
    """Paths whose content digest differs between two readings, or that only one of them saw. A file that the second
    did not hash counts as changed if its state differs; if nothing else did, it was one of those."""
    old, new = ({receipt.path: receipt for receipt in reading} for reading in (before, after))
    found = [path for path in old.keys() | new.keys() if _differs(old.get(path), new.get(path))]
    return sorted(found or [receipt.path for receipt in after if not receipt.content_digest])


def _differs(old: Receipt | None, new: Receipt | None) -> bool:
    if old is None or new is None:
        return True
    if not new.content_digest:
        return _state(old) != _state(new)
    return old.content_digest != new.content_digest


def require_path(path: str) -> None:
    """Raises CheckpointNotFoundError, with the system's reason, unless the path can be looked at."""
    try:
        os.stat(path)
    except OSError as error:
        broken = os.path.islink(path)
        what = f"is a broken link to {os.readlink(path)}" if broken else (error.strerror or str(error))
        raise CheckpointNotFoundError(f"checkpoint {path}: {what}", {"path": path}) from error
