import errno
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preload.daemon.capacity import (
    Ledger,
    available_host_bytes,
    check_kernel_has,
    control_group_headroom_bytes,
    parse_limit,
    physical_host_bytes,
    refusal,
)
from preload.daemon.errors import BadRequestError, CacheError, InternalError, NoMemoryError, TooManyError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80%", 800), ("1000", 1000), ("2K", 2048), ("1.5M", 1572864), ("1GiB", 1 << 30), ("3gb", 3 << 30)],
)
def test_limit_is_a_share_or_a_size(text: str, expected: int) -> None:
    assert parse_limit(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "0", "-1G", "101%", "0%", "many", "5X", "nan"])
def test_impossible_limit_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadRequestError, match="memory limit"):
        parse_limit(text, 1000)


def test_refusal_tells_all_the_numbers() -> None:
    ledger = Ledger("host", 1000)
    ledger.reserve(600, 0)
    ledger.commit(600)
    ledger.reserve(300, 0)
    with pytest.raises(NoMemoryError) as refusal:
        ledger.reserve(200, 600)
    for number in ("200", "1,000", "600", "300", "100 are free"):
        assert number in refusal.value.message
    assert refusal.value.fields["evictable_bytes"] == "600"
    assert (ledger.resident_bytes, ledger.reserved_bytes) == (600, 300)


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.booleans())))
def test_ledger_never_exceeds_its_capacity_and_ends_empty(steps: list[tuple[int, bool, bool]]) -> None:
    ledger = Ledger("host", 1000)
    resident = []
    for num_bytes, commits, frees in steps:
        try:
            ledger.reserve(num_bytes, 0)
        except NoMemoryError:
            assert num_bytes > ledger.free_bytes
            continue
        if commits:
            ledger.commit(num_bytes)
            resident.append(num_bytes)
        else:
            ledger.release(num_bytes)
        if frees and resident:
            ledger.free(resident.pop())
        assert 0 <= ledger.resident_bytes + ledger.reserved_bytes <= ledger.capacity_bytes
    for num_bytes in resident:
        ledger.free(num_bytes)
    assert (ledger.resident_bytes, ledger.reserved_bytes) == (0, 0)


def test_host_has_memory_and_reports_it() -> None:
    assert 0 < available_host_bytes() <= physical_host_bytes() * 1.01


def test_control_group_leaves_what_its_tightest_level_leaves(tmp_path: Path) -> None:
    def group(folder: Path, limit: str, used: int, cache: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")

    own = tmp_path / "cgroup"
    own.write_text("0::/system.slice/preload.service\n")
    root = tmp_path / "fs"
    group(root, "max", 0, 0)
    group(root / "system.slice", "1000", 300, 50)
    group(root / "system.slice" / "preload.service", "max", 200, 0)
    assert control_group_headroom_bytes(str(root), str(own)) == 750
    group(root / "system.slice" / "preload.service", "400", 200, 0)
    assert control_group_headroom_bytes(str(root), str(own)) == 200
    own.write_text("5:memory:/x\n")
    assert control_group_headroom_bytes(str(root), str(own)) > 1 << 60


def test_memory_promised_to_others_is_not_there_for_a_load() -> None:
    check_kernel_has(1 << 20)
    with pytest.raises(NoMemoryError, match="available"):
        check_kernel_has(1 << 20, promised_bytes=available_host_bytes())


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EMFILE, TooManyError, f"limit allows, {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; raise it"),
        (errno.ENFILE, TooManyError, "fs.file-max"),
        (errno.EAGAIN, TooManyError, "limit on processes"),
        (errno.ENOMEM, NoMemoryError, "the kernel has no memory"),
        (errno.EFBIG, BadRequestError, "larger than the system lets a file be"),
        (errno.EINVAL, InternalError, "Invalid argument"),
    ],
)
def test_what_the_system_does_not_give_is_refused_by_the_limit_that_was_met(
    number: int, kind: type[CacheError], words: str
) -> None:
    error = refusal(OSError(number, os.strerror(number)), "a segment of 5 bytes")
    assert type(error) is kind
    assert error.message.startswith("cannot create a segment of 5 bytes: ")
    assert words in error.message
