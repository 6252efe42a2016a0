"""A machine without a driver: devices are refused in one line, and everything else works."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.errors import DeviceError
from preload.protos import weight_cache_pb2 as pb

ANY_GPU = "cuda:GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture(scope="module", autouse=True)
def no_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    pytest.skip("this machine has a driver")


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()


@pytest.mark.parametrize("command", ["load", "check"])
def test_a_command_says_in_one_line_that_there_is_no_driver(
    daemon: Any, cli: Any, raw_checkpoint: Path, command: str
) -> None:
    words = (command, str(raw_checkpoint), "--model", "raw", "--device", "cuda:0")
    done = cli(*words, "--runtime-dir", str(daemon.runtime_dir))
    assert done.returncode == 27
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("preload: no GPU can be used: cuInit is not there, because no NVIDIA driver")
    told = json.loads(cli(*words, "--json", "--runtime-dir", str(daemon.runtime_dir)).stdout)
    assert {"reason": "NO_DEVICE", "exit_code": 27}.items() <= (told.get("error") or told).items()


def test_a_daemon_without_a_driver_refuses_the_device_and_serves_the_host(
    daemon: Any, raw_checkpoint: Path, load_on: Any
) -> None:
    with pytest.raises(DeviceError, match="no GPU can be used: cuInit is not there"):
        load_on(daemon, raw_checkpoint, ANY_GPU)
    assert [d.name for d in _list(daemon).devices] == ["host"]
    assert load_on(daemon, raw_checkpoint, "host").state == pb.GENERATION_STATE_READY


def test_a_daemon_that_is_asked_for_no_device_loads_no_driver(
    daemon: Any, raw_checkpoint: Path, load_on: Any
) -> None:
    load_on(daemon, raw_checkpoint, "host")
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "blake3" in maps
    if not any(g.device != "host" for g in daemon.generations()):
        assert "libcuda" not in maps


def _list(daemon: Any) -> Any:
    with daemon.control() as control:
        return control.list()
