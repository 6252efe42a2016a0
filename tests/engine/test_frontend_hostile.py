"""What a frontend must not say, and what must not end it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECRET = "the-launch-code-is-4711"
KEY = "sk-nobody-may-read-this"


def test_neither_keys_nor_prompts_nor_answers_are_in_the_log(
    start_frontend: Callable[..., Any], tmp_path: Path
) -> None:
    """Not with the access log on, not of requests that are refused, and not of a core that dies of one."""
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    frontend = start_frontend({"poison_id": 7}, wait_ready=False, api_key_file=str(keys), access_log=True)
    good, bad = {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {KEY}-not"}
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
    assert frontend.post("/v1/chat/completions", json=chat, headers=good).status_code == 200
    assert frontend.post("/v1/chat/completions", json=chat, headers=bad).status_code == 401
    assert frontend.post("/v1/chat/completions", json={**chat, "n": SECRET}, headers=good).status_code == 400
    assert frontend.post("/v1/completions", content=f'{{"{SECRET}"', headers=good).status_code == 400
    poisoned = frontend.post("/v1/completions", json={"prompt": [7, 8, 9], "user": SECRET}, headers=good)
    assert poisoned.status_code == 500
    assert "/v1/chat/completions" in frontend.log
    assert SECRET not in frontend.log
    assert KEY not in frontend.log
    cores = frontend.get("/debug/cores", headers=good).text
    assert SECRET not in cores


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KiB."""
    with tempfile.TemporaryDirectory(prefix="preload-disk-") as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False)
        if mounted.returncode:
            pytest.skip("nothing can be mounted here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_frontend_whose_disk_is_full_serves_and_replaces_its_core(
    prepare_frontend: Callable[..., Any], small_disk: Path, wait_for: Callable[..., Any]
) -> None:
    """Its log and its sockets are on it. Nothing more is logged, and nothing else is missing: what a core says is
    still taken from its pipe, which would fill up."""
    frontend = prepare_frontend({"chatter": 100_000})
    frontend.folder = small_disk
    frontend.start()
    fd = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(4096))
    log = frontend.log
    try:
        for number in (2, 3):
            frontend.kill_core()
            wait_for(lambda number=number: len(frontend.cores()) == number, "another core")
            assert frontend.complete(prompt=[5, 6, 7], max_tokens=4, temperature=0).status_code == 200
        assert len(frontend.log) - len(log) < 4096, "the disk was not full"
    finally:
        os.close(fd)
        frontend.stop()
