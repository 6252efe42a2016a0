"""The build and its cache: hits start nothing, and what is missing is said."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from preload.engine.core import kernels
from preload.engine.errors import RequestError
from preload.engine.kernels.native import build
from preload.engine.kernels.native.build import Compilation, KernelsUnavailableError, find_or_build, start_build
from preload.engine.loading import job as loading_job
from preload.protos import loader_pb2

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles at once instead of the kernels, and a user without a cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / build.MAIN_SOURCE).write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return folder


def refuse_processes(*_: Any, **__: Any) -> None:
    raise AssertionError("a process was started")


def test_a_cache_hit_starts_no_process(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = find_or_build(tmp_path / "cache")
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(subprocess, "Popen", refuse_processes)
    assert find_or_build(tmp_path / "cache") == made
    other = find_or_build(tmp_path / "another daemon's cache")  # from the user's
    assert other.read_bytes() == made.read_bytes()


def test_another_source_is_another_file(small_source: Path, tmp_path: Path) -> None:
    first = find_or_build(tmp_path / "cache")
    (small_source / "more.h").write_text("// changed\n")
    assert find_or_build(tmp_path / "cache") != first
    assert find_or_build(tmp_path / "cache", ["-O1"]) != first


def test_two_builds_at_once_end_with_one_file(small_source: Path, tmp_path: Path) -> None:
    running = [start_build(tmp_path / "cache") for _ in range(2)]
    assert all(isinstance(compilation, Compilation) for compilation in running)
    paths = {compilation.wait() for compilation in running if isinstance(compilation, Compilation)}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [path.name for path in paths]


def test_a_cancelled_build_leaves_nothing(small_source: Path, tmp_path: Path) -> None:
    compilation = start_build(tmp_path / "cache")
    assert isinstance(compilation, Compilation)
    compilation.cancel()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_fails_is_quoted(small_source: Path, tmp_path: Path) -> None:
    (small_source / build.MAIN_SOURCE).write_text("this is not C++\n")
    with pytest.raises(KernelsUnavailableError, match="error"):
        find_or_build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_the_core_says_so_and_computes_with_torch(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    ops = kernels.choose_ops(str(tmp_path / "runtime"), torch.float32, 1)
    assert "torch, without native kernels: no C++ compiler" in ops.describe()
    with pytest.raises(RequestError, match="kv_cache_dtype is bfloat16"):
        kernels.choose_ops(str(tmp_path / "runtime"), torch.float32, 1, kv_cache_dtype="bfloat16")


def test_without_a_compiler_what_another_process_built_serves(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = find_or_build(tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert find_or_build(tmp_path / "cache") == made


def test_a_folder_that_others_can_write_to_is_refused(small_source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(KernelsUnavailableError, match="nobody else can write"):
        find_or_build(tmp_path / "cache")


def test_a_load_compiles_kernels_beside_its_reading_and_survives_their_failure(
    small_source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = loader_pb2.Job(kernel_cache_dir=str(tmp_path / "cache"))
    compilation = loading_job._start_kernels(job)
    assert compilation is not None
    loading_job._finish_kernels(compilation)
    assert loading_job._start_kernels(job) is None  # a hit
    (small_source / build.MAIN_SOURCE).write_text("this is not C++\n")
    failing = loading_job._start_kernels(job)
    assert failing is not None
    loading_job._finish_kernels(failing)
    assert "native kernels are not built: the compiler ended with" in capfd.readouterr().err
    assert loading_job._start_kernels(loader_pb2.Job()) is None  # nobody said where to keep them
