"""The real model from a real GPU says what it says from the host, computed by Triton's kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = "The capital of France is"


def test_generated_text_is_that_of_the_host(daemon: Any, demo_model: Path, gpu: str) -> None:
    def generate(*words: str) -> str:
        command = [sys.executable, "-P", "-m", "preload.cli.main", "generate", str(demo_model), PROMPT, "--json"]
        command += ["--max-tokens", "24", "--runtime-dir", str(daemon.runtime_dir), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert words[1] == "host" or "kernels: Triton" in done.stderr
        return str(json.loads(done.stdout)["text"])

    expected = generate("--device", "host")
    assert generate("--device", gpu) == expected
