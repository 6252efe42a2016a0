"""What a template imports: all that a core needs, and nothing that starts a thread."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from preload.protos import engine_core_pb2 as pb
from preload.protos import engine_core_pb2_grpc as pb_grpc

TIMEOUT_S = 120


def test_a_core_imports_nothing_after_the_template_has(
    daemon: Any, tiny: Any, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    tiny.oracle.save_pretrained(tmp_path / "tiny")
    daemon.load(tmp_path / "tiny")
    config = {
        "runtime_dir": str(daemon.runtime_dir),
        "checkpoint": str(tmp_path / "tiny"),
        "socket_path": str(tmp_path / "core.sock"),
        "num_threads": 2,
    }
    script = (
        "import sys\n"
        "from preload.engine.template.imports import import_all, num_threads\n"
        "import_all()\n"
        "assert num_threads() == 1, num_threads()\n"
        "known = set(sys.modules)\n"
        "from preload.engine.core.process import main\n"
        "code = main(1, ['--config-json', sys.argv[1]], is_forked=True)\n"
        "print(code, sorted(set(sys.modules) - known))\n"
    )
    command = [sys.executable, "-c", script, json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as core:
        wait_for(lambda: (tmp_path / "core.sock").exists() or core.poll() is not None, "the core to listen")
        with grpc.insecure_channel(f"unix:{tmp_path / 'core.sock'}") as channel:
            request = pb.CoreRequest(add=pb.AddRequest(request_id="r", prompt_ids=[1, 2]))
            request.add.sampling.max_tokens = 2
            stub = pb_grpc.EngineCoreStub(channel)
            assert list(stub.Generate(iter([request]), timeout=TIMEOUT_S, wait_for_ready=True))
            stub.Drain(pb.DrainRequest(deadline_ms=5000), timeout=TIMEOUT_S)
        assert core.stdout is not None
        said = core.stdout.read()
        assert core.wait(TIMEOUT_S) == 0, said
    assert said.splitlines()[-1] == "0 []"
