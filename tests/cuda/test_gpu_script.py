"""The script for a machine with a GPU runs from start to end on the emulated driver: only its figures are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SECTIONS = ["questions", "deaths", "holder", "kernels", "conversion", "starts", "attach"]
SMALL = "--max-model-len 256 --max-num-seqs 2 --token-budget 64"


def test_the_script_runs_to_its_end_and_finds_what_the_driver_does(tmp_path: Path) -> None:
    """One run, since it takes a minute, on a machine of its own with one device of 4 GiB."""
    command = [sys.executable, "-P", "-m", "preload.bench.gpu_restart", "--sizes-mib", "16,32", "--attaches", "3",
               "--tensors", "64,10,1000", "--serve-words", SMALL, "--out", str(tmp_path / "result.json")]  # fmt: skip
    machine = Path(__file__).parents[1] / "fakes" / "cuda_machine.py"
    finished = subprocess.run([sys.executable, str(machine), *command], capture_output=True, text=True, timeout=550)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    check_sections(finished.stdout, result)
    check_deaths(result)
    check_holder(result)
    check_questions(result)
    check_attaches(result)
    check_starts(result)
    check_conversion(result)


def check_sections(table: str, result: dict[str, Any]) -> None:
    """Every section runs, and the table says what it is worth."""
    assert list(result["sections"]) == SECTIONS
    assert (result["failed"], result["skipped"]) == ({}, {})
    assert result["machine"]["driver"] == "emulated driver"
    assert "emulated driver: no figure here says anything about a GPU" in table
    assert all(f"\n{name} (" in table for name in SECTIONS)


def check_conversion(result: dict[str, Any]) -> None:
    """It is said by whom, and why not by the device: vectors are converted by every recipe."""
    rows = {row["recipe"]: row["said"] for row in result["sections"]["conversion"]}
    assert len(rows) == 7
    for said in rows.values():
        assert said.startswith("converted by the CPU because cuda:GPU-")
        assert said.endswith("is emulated")


def check_deaths(result: dict[str, Any]) -> None:
    deaths = {row["event"]: row["found"] for row in result["sections"]["deaths"]}
    intact = "64 tensors, 16777216 bytes as their digests say"
    checked = [event for event in deaths if "weights after it" in event or event == "before"]
    assert {event: deaths[event] for event in checked} == dict.fromkeys(checked, intact)
    assert deaths["an engine attached before it"] == "reads the same bytes"
    assert "attached again after" in deaths["daemon killed"]
    assert "had finished" not in deaths["loader killed"], "its death is what the others are to survive"
    assert "failed" in deaths["a store into the weights"]


def check_holder(result: dict[str, Any]) -> None:
    rows = [row["found"] for row in result["sections"]["holder"]]
    assert "digests say" in rows[0]
    assert "digests say" in rows[3], "a daemon's end is not its holder's"
    assert "died of SIGSEGV" in rows[4]
    assert "load again" in rows[5]


def check_questions(result: dict[str, Any]) -> None:
    answers = {row["question"]: row["answer"] for row in result["sections"]["questions"]}
    assert len(answers) == 7
    outlives = "VMM: does memory outlive its exporter while a third process holds the descriptor"
    assert answers[outlives].startswith("yes, the same bytes")
    assert "INVALID_CONTEXT" in answers["IPC: may the exporter open its own handle"]


def check_attaches(result: dict[str, Any]) -> None:
    rows = result["sections"]["attach"]
    assert [(row["bytes"] >> 20, row["num_tensors"]) for row in rows] == [(16, 64), (32, 64), (16, 10), (16, 1000)]
    for row in rows:
        assert row["bytes_by_attach"] == 0
        assert row["free_after"] == row["free_before"]
        assert row["resident_bytes"] >= row["bytes"]


def check_starts(result: dict[str, Any]) -> None:
    starts = result["sections"]["starts"]
    assert [row["start"] for row in starts] == [
        "graphs background, no kernel cached", "graphs background, after SIGKILL",
    ]  # fmt: skip
    for row in starts:
        assert {"exec", "imports", "attach", "build", "kv_cache", "warm_up", "ready"} <= set(row["phases"])
