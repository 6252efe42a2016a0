"""Compiles the native kernels with the system's compiler and caches the result.

Owns the cache folders' contents: `kernels-<sources, flags, CPU>-<compiler>.so`. There are two: the one that the
caller names (the daemon's, which engines see wherever they run, and which is empty after a boot), and the user's
(~/.cache/preload/kernels), from which the first is filled, so that a machine compiles once. A name is a function of
all that determines the bytes, so a file that exists is current and starts no process; files appear by rename, so
two processes may build at once and a reader never sees half a file. Without a compiler, a file that any compiler
made of the same sources for this CPU serves. Knows neither torch nor ctypes: the loader uses it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
MAIN_SOURCE = "kernels.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread",
    # Neither changes a result: nobody reads errno or the floating-point exception flags. -ffast-math would.
    "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi",
)  # fmt: skip
MAX_COMPILER_OUTPUT_CHARACTERS = 2000


class KernelsUnavailableError(Exception):
    """Raised when there are no native kernels; the message says why. The caller uses the torch reference, and
    says so."""


class Compilation:
    """A running compiler. Ends with `wait`, or with `cancel`, which does nothing after it."""

    def __init__(self, process: subprocess.Popen[bytes], temporary: str, target: Path) -> None:
        self._process = process
        self._temporary = temporary
        self._target = target

    def wait(self) -> Path:
        """The shared object. Raises KernelsUnavailableError with the compiler's words if it failed."""
        output = self._process.communicate()[0].decode(errors="replace")
        try:
            if self._process.returncode:
                raise KernelsUnavailableError(
                    f"the compiler ended with {self._process.returncode}: "
                    f"{output.strip()[-MAX_COMPILER_OUTPUT_CHARACTERS:]}"
                )
            os.rename(self._temporary, self._target)
            _offer_to_user_cache(self._target)
        except BaseException:
            Path(self._temporary).unlink(missing_ok=True)
            raise
        return self._target

    def cancel(self) -> None:
        """Stops the compiler and removes what it left."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        Path(self._temporary).unlink(missing_ok=True)


def find_or_build(cache_dir: Path, extra_flags: Sequence[str] = ()) -> Path:
    """The shared object, compiled if the cache lacks it. Raises KernelsUnavailableError."""
    found = start_build(cache_dir, extra_flags)
    return found.wait() if isinstance(found, Compilation) else found


def start_build(cache_dir: Path, extra_flags: Sequence[str] = ()) -> Path | Compilation:
    """The cached shared object, or the compiler that was started to make it. Raises KernelsUnavailableError."""
    make_cache_dir(cache_dir)
    flags = (*FLAGS, *extra_flags)
    stem = f"kernels-{_digest(_sources(), flags, _cpu())}"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        of_others = sorted(cache_dir.glob(f"{stem}-*.so"))
        if of_others:
            return of_others[0]
        raise KernelsUnavailableError(f"no C++ compiler ({', '.join(COMPILERS)}) on the PATH and none cached")
    target = cache_dir / f"{stem}-{_digest(_identity(compiler))}.so"
    if target.exists() or _take_from_user_cache(target):
        return target
    try:
        descriptor, temporary = tempfile.mkstemp(prefix="building-", suffix=".so", dir=cache_dir)
    except OSError as error:
        raise KernelsUnavailableError(f"cannot write to the kernel cache {cache_dir}: {error.strerror}") from error
    os.close(descriptor)
    command = [compiler, *flags, str(SOURCE_DIR / MAIN_SOURCE), "-o", temporary]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise KernelsUnavailableError(f"cannot start {compiler}: {error}") from error
    return Compilation(process, temporary, target)


def user_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "preload" / "kernels"


def _take_from_user_cache(target: Path) -> bool:
    """Copies the file of that name from the user's cache, if it is there and nobody else can write to it."""
    source = user_cache_dir() / target.name
    if not source.exists():
        return False
    make_cache_dir(source.parent)
    _copy(source, target)
    return True


def _offer_to_user_cache(made: Path) -> None:
    """A user without a home folder compiles once per runtime folder instead: no reason to complain."""
    with contextlib.suppress(OSError, KernelsUnavailableError):
        make_cache_dir(user_cache_dir())
        _copy(made, user_cache_dir() / made.name)


def _copy(source: Path, target: Path) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix="building-", suffix=".so", dir=target.parent)
    os.close(descriptor)
    try:
        shutil.copyfile(source, temporary)
        os.rename(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise KernelsUnavailableError(f"cannot copy the kernels to {target.parent}: {error.strerror}") from error


def make_cache_dir(cache_dir: Path) -> None:
    """The folder, mode 0700 if it is new. Raises KernelsUnavailableError if others could plant code in it."""
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache_dir.stat()
    except OSError as error:
        raise KernelsUnavailableError(f"cannot use the kernel cache {cache_dir}: {error}") from error
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise KernelsUnavailableError(
            f"the kernel cache {cache_dir} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:o}; "
            "code is loaded only from a folder that nobody else can write to"
        )


def _sources() -> bytes:
    files = sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in (".cpp", ".h"))
    return b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)


def _identity(compiler: str) -> str:
    """Changes with an update of the compiler, and needs no process to find out."""
    path = os.path.realpath(compiler)
    status = os.stat(path)
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _cpu() -> str:
    """Architecture, model and features: what -march=native looks at."""
    wanted = ("model name", "flags", "Features", "CPU part")
    with open("/proc/cpuinfo") as file:
        lines = {line for line in file if line.startswith(wanted)}
    return platform.machine() + "".join(sorted(lines))


def _digest(*parts: object) -> str:
    return hashlib.sha256(b"\0".join(p if isinstance(p, bytes) else repr(p).encode() for p in parts)).hexdigest()[:16]
