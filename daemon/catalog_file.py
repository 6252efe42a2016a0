"""A small file in a memfd that survives its writer being killed in mid-write.

Two headers stand at fixed places; each names a body (offset, length) and carries a digest over itself and the body. A
write puts the new body where the current one is not, then the header that is not current. A reader takes the newer of
the headers whose digest holds, so it sees the old state or the new one and nothing in between.
"""

from __future__ import annotations

import os
import struct

from blake3 import blake3

_HEADER = struct.Struct("<8sQQQ32s")
_NAME = b"PRELOAD"
_MAGIC = _NAME + b"1"
_HEADER_PLACES = (0, 512)
_BODIES_START = 4096
MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_OFFSET = 2**63 - 1


class CatalogFileError(Exception):
    """Raised when no header of the file holds; the caller should treat what it described as lost."""


class CatalogVersionError(Exception):
    """Raised when another version of this format wrote the file; the caller should leave everything as it is."""


class CatalogFile:
    """Owns the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._sequence = 0
        self._body = (0, 0)

    @staticmethod
    def create() -> CatalogFile:
        return CatalogFile(os.memfd_create("preload:catalog", os.MFD_CLOEXEC))

    def write(self, body: bytes) -> None:
        """Replaces the content. Raises OSError (ENOSPC), and CatalogFileError on a content that is too large."""
        if len(body) > MAX_BODY_BYTES:
            raise CatalogFileError(f"a catalog of {len(body):,} bytes; at most {MAX_BODY_BYTES:,} are allowed")
        offset, length = self._body
        fits_before = offset - _BODIES_START >= len(body)
        start = _BODIES_START if fits_before or not length else offset + length
        os.pwrite(self.fd, body, start)
        self._sequence += 1
        header = _pack(self._sequence, start, body)
        os.pwrite(self.fd, header, _HEADER_PLACES[self._sequence % 2])
        self._body = (start, len(body))

    def read(self) -> bytes:
        """The newest content that is whole. Raises CatalogFileError, CatalogVersionError."""
        found = [entry for entry in map(self._read_at, _HEADER_PLACES) if entry is not None]
        if not found:
            raise CatalogFileError("the parked catalog has no header that holds")
        self._sequence, start, body = max(found)
        self._body = (start, len(body))
        return body

    def _read_at(self, place: int) -> tuple[int, int, bytes] | None:
        header = os.pread(self.fd, _HEADER.size, place)
        if len(header) < _HEADER.size:
            return None
        magic, sequence, start, length, _ = _HEADER.unpack(header)
        if magic != _MAGIC and magic.startswith(_NAME) and magic[-1:].isdigit():
            raise CatalogVersionError(f"the parked catalog has the format {magic.decode(errors='replace')}")
        if magic != _MAGIC or length > MAX_BODY_BYTES or start > _MAX_OFFSET:
            return None
        body = os.pread(self.fd, length, start)
        if len(body) != length or _pack(sequence, start, body) != header:
            return None
        return sequence, start, body


def _pack(sequence: int, start: int, body: bytes) -> bytes:
    head = struct.pack("<QQQ", sequence, start, len(body))
    return _HEADER.pack(_MAGIC, sequence, start, len(body), blake3(head + body).digest())
