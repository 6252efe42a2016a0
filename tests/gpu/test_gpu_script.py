"""The prepared script on a real GPU, with weights small enough for a test: every section, and nothing fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_script_runs_on_this_gpu(gpu: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ["--device", gpu, "--sizes-mib", "512,1024", "--attaches", "5", "--out", str(out)]
    done = subprocess.run([sys.executable, "-P", "-m", "preload.bench.gpu_restart", *words], timeout=500)
    result = json.loads(out.read_text())
    assert (done.returncode, result["failed"]) == (0, {})
    assert result["machine"]["driver"] != "emulated driver"
    deaths = {row["event"]: row["found"] for row in result["sections"]["deaths"]}
    assert "digests say" in deaths["before"]
    assert {found for event, found in deaths.items() if "weights after it" in event} == {deaths["before"]}
