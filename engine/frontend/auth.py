"""API keys: read from a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

from .errors import StartError, UnauthorizedError


class ApiKeys:
    """The keys that are let in; no key at all lets everybody in. Only digests are kept."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @staticmethod
    def from_file(path: str) -> ApiKeys:
        """One key a line; empty lines and those that start with # are skipped. Raises StartError."""
        if not path:
            return ApiKeys([])
        try:
            with open(path, encoding="utf-8") as file:
                mode = os.fstat(file.fileno()).st_mode
                lines = [line.strip() for line in file]
        except (OSError, ValueError) as error:
            raise StartError(f"the API key file {path} cannot be read: {error}") from error
        if mode & stat.S_IRWXO:
            raise StartError(f"the API key file {path} is open to every user; run: chmod o-rwx {path}")
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise StartError(f"the API key file {path} holds no key; add one, or leave the option out")
        return ApiKeys(keys)

    def check(self, authorization: str | None) -> None:
        """Raises UnauthorizedError unless the header carries one of the keys."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise UnauthorizedError("no API key was sent; send it as 'Authorization: Bearer KEY'")
        given = _digest(key.strip())
        # Every key is compared, so that the time says nothing about which one came close.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise UnauthorizedError("the API key is not known here")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
