"""The real loader, held up or made to misbehave by files in the folder that is its first argument.

stop_at   a number: once so many bytes are asked for, the next read waits until this file is gone
waiting   written by the loader while it waits: its process id
lie       the manifest gets a wrong digest for its first tensor, as if memory had changed after the commit
crash     says its content on stderr and exits with status 3 instead of loading
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from preload.engine.loading import job, loader


def main() -> int:
    folder = Path(sys.argv[1])
    if (folder / "crash").exists():
        print((folder / "crash").read_text(), file=sys.stderr)
        return 3
    if (folder / "stop_at").exists():
        _hold_reads(folder, int((folder / "stop_at").read_text()))
    if (folder / "lie").exists():
        _lie()
    return loader.main(sys.argv[2:])


def _hold_reads(folder: Path, limit_bytes: int) -> None:
    read, lock, num_bytes = os.preadv, threading.Lock(), 0

    def held(*arguments: Any) -> int:
        nonlocal num_bytes
        with lock:  # of several threads no two are the last that may read
            is_open = num_bytes < limit_bytes
            num_bytes += sum(memoryview(buffer).nbytes for buffer in arguments[1]) if is_open else 0
        if not is_open:
            (folder / "waiting").write_text(str(os.getpid()))
            while (folder / "stop_at").exists():
                time.sleep(0.002)
        return read(*arguments)

    os.preadv = held


def _lie() -> None:
    make_manifest = job.make_manifest

    def lying(*arguments: Any) -> Any:
        manifest = make_manifest(*arguments)
        manifest.tensors[0].digest = bytes(32)
        return manifest

    job.make_manifest = lying


if __name__ == "__main__":
    sys.exit(main())
