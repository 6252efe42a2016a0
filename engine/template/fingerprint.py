"""What code a template holds, and where its socket lies.

The fingerprint changes when a file of the engine or of the contracts does, or one of the installed distributions
beside torch, or the interpreter. It is computed from names and inodes (size, change time), never from contents:
a frontend does it on every start, within a millisecond or two. A change that a stat does not show does not exist,
because the kernel alone sets the change time.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import preload.engine
import preload.protos
from preload.engine.errors import RequestError
from preload.engine.places import MAX_SOCKET_PATH_BYTES, own_dir

_SOURCES = (".py", ".cpp", ".h")


@dataclass(frozen=True)
class Place:
    """The files of one template in a runtime folder: one per user and installation of the engine.

    Two installations side by side, as during an update, have a template each."""

    runtime_dir: Path
    name: str

    @property
    def socket(self) -> str:
        return str(self.runtime_dir / f"{self.name}.sock")

    @property
    def lock(self) -> Path:
        """Held, and filled with its process id, by the template that serves here."""
        return self.runtime_dir / f"{self.name}.lock"

    @property
    def log(self) -> Path:
        return self.runtime_dir / f"{self.name}.log"


def place_of(runtime_dir: str | None) -> Place:
    """The template of this user and this installation. Raises RequestError if the path is too long for a socket."""
    installation = f"{sys.executable}\0{_folder(preload.engine)}"
    name = f"template-{os.geteuid()}-{hashlib.sha256(installation.encode()).hexdigest()[:8]}"
    place = Place(Path(os.path.abspath(own_dir(runtime_dir))), name)
    if len(os.fsencode(place.socket)) > MAX_SOCKET_PATH_BYTES:
        raise RequestError(
            f"the socket path {place.socket} is longer than {MAX_SOCKET_PATH_BYTES} bytes; "
            "use a shorter --runtime-dir"
        )
    return place


def fingerprint() -> str:
    """Hexadecimal digest of the code that a core started now would run."""
    digest = hashlib.sha256()
    for part in (sys.version, os.path.realpath(sys.executable), *_distributions()):
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    for module in (preload.engine, preload.protos):
        for line in sorted(_sources(_folder(module))):
            digest.update(line.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def _folder(module: object) -> str:
    path: str = module.__path__[0]  # type: ignore[attr-defined]
    return path


def _sources(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _sources(entry.path)
            elif entry.name.endswith(_SOURCES):
                yield f"{entry.path} {_state(entry.stat())}"


def _state(stat: os.stat_result) -> str:
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


@cache
def _torch_folder() -> Path | None:
    """Found without an import: a frontend has no business with torch itself."""
    return next((Path(p) for p in sys.path if os.path.isfile(os.path.join(p, "torch", "version.py"))), None)


def _distributions() -> list[str]:
    """Names and versions of everything installed beside torch, and the state of torch itself."""
    folder = _torch_folder()
    if folder is None:
        return []
    names = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
    return [*names, _state((folder / "torch" / "version.py").stat())]
