"""The script for a machine with a GPU runs from start to end on the emulated driver: only its figures are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECTIONS = ["questions", "deaths", "holder", "kernels", "starts", "attach"]
SMALL = "--max-model-len 256 --max-num-seqs 2 --token-budget 64"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One run on a machine of its own, with one device of 4 GiB."""
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-P", "-m", "preload.bench.gpu_restart", "--sizes-mib", "16,32", "--attaches", "3",
               "--tensors", "64,10,1000", "--serve-words", SMALL, "--out", str(folder / "result.json")]  # fmt: skip
    machine = Path(__file__).parents[1] / "fakes" / "cuda_machine.py"
    finished = subprocess.run([sys.executable, str(machine), *command], capture_output=True, text=True, timeout=550)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    finished.args = folder / "result.json"
    return finished


@pytest.fixture(scope="module")
def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.args.read_text())
    return found


def test_every_section_runs_and_the_table_says_what_it_is_worth(
    done: subprocess.CompletedProcess[str], result: dict[str, Any]
) -> None:
    assert list(result["sections"]) == SECTIONS
    assert (result["failed"], result["skipped"]) == ({}, {})
    assert result["machine"]["driver"] == "emulated driver"
    assert "emulated driver: no figure here says anything about a GPU" in done.stdout
    assert all(f"\n{name} (" in done.stdout for name in SECTIONS)


def test_weights_are_the_same_after_every_death(result: dict[str, Any]) -> None:
    deaths = {row["event"]: row["found"] for row in result["sections"]["deaths"]}
    intact = "64 tensors, 16777216 bytes as their digests say"
    checked = [event for event in deaths if "weights after it" in event or event == "before"]
    assert {event: deaths[event] for event in checked} == dict.fromkeys(checked, intact)
    assert deaths["an engine attached before it"] == "reads the same bytes"
    assert "attached again after" in deaths["daemon killed"]
    assert "killed" in deaths["loader killed"]
    assert "failed" in deaths["a store into the weights"]


def test_the_end_of_a_holder_is_told(result: dict[str, Any]) -> None:
    rows = [row["found"] for row in result["sections"]["holder"]]
    assert "digests say" in rows[0]
    assert "digests say" in rows[3], "a daemon's end is not its holder's"
    assert "died of SIGSEGV" in rows[4]
    assert "load again" in rows[5]


def test_open_questions_are_answered(result: dict[str, Any]) -> None:
    answers = {row["question"]: row["answer"] for row in result["sections"]["questions"]}
    assert len(answers) == 7
    outlives = "VMM: does memory outlive its exporter while a third process holds the descriptor"
    assert answers[outlives].startswith("yes, the same bytes")
    assert "INVALID_CONTEXT" in answers["IPC: may the exporter open its own handle"]


def test_an_attach_takes_no_memory_and_gives_all_back(result: dict[str, Any]) -> None:
    rows = result["sections"]["attach"]
    assert [(row["bytes"] >> 20, row["num_tensors"]) for row in rows] == [(16, 64), (32, 64), (16, 10), (16, 1000)]
    for row in rows:
        assert row["bytes_by_attach"] == 0
        assert row["free_after"] == row["free_before"]
        assert row["resident_bytes"] >= row["bytes"]


def test_starts_have_their_phases(result: dict[str, Any]) -> None:
    starts = result["sections"]["starts"]
    assert [row["start"] for row in starts] == [
        "graphs background, no kernel cached", "graphs background, after SIGKILL",
    ]  # fmt: skip
    for row in starts:
        assert {"exec", "imports", "attach", "build", "kv_cache", "warm_up", "ready"} <= set(row["phases"])
