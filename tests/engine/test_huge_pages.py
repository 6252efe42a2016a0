"""Segments in huge pages: content and lifetime of mappings, and that the pages are huge where the kernel can."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from preload.engine import huge_pages
from preload.engine.huge_pages import HUGE_BYTES, HugePages, map_shared, private_memory

SIZE = 5 * HUGE_BYTES + 3 * mmap.PAGESIZE


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("huge-pages-under-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "huge-pages-under-test" in line]


def huge_kib() -> int:
    """Of all shared memory mapped here, KiB in huge pages."""
    smaps = Path("/proc/self/smaps").read_text()
    return sum(int(count) for count in re.findall(r"ShmemPmdMapped:\s+(\d+) kB", smaps))


def fill(fd: int, content: bytes) -> HugePages:
    pages = HugePages(fd, SIZE)
    step = 300_000
    for offset in range(0, SIZE, step):
        pages.prepare(offset, min(step, SIZE - offset))
        os.pwrite(fd, content[offset : offset + step], offset)
    pages.finish()
    pages.close()
    return pages


def test_a_view_has_the_content_and_lives_as_long_as_a_part_of_it(memfd: int) -> None:
    content = os.urandom(SIZE)
    fill(memfd, content)
    view = map_shared(memfd, SIZE)
    assert view.readonly
    assert view.nbytes == SIZE
    assert view == content
    part = view[HUGE_BYTES - 7 : HUGE_BYTES + 7]
    del view
    gc.collect()
    assert part == content[HUGE_BYTES - 7 : HUGE_BYTES + 7]
    assert len(mappings()) == 1
    del part
    gc.collect()
    assert not mappings()


def test_what_was_prepared_is_mapped_in_huge_pages(memfd: int) -> None:
    before = huge_kib()
    pages = fill(memfd, bytes(SIZE))
    if pages.num_huge == 0:
        pytest.skip("this kernel gives no huge pages for shared memory (MADV_COLLAPSE, Linux 6.1)")
    view = map_shared(memfd, SIZE)
    assert sum(view[::512]) == 0
    assert huge_kib() - before == pages.num_huge * HUGE_BYTES // 1024
    assert pages.num_huge <= pages.num_pages == 5


def test_a_small_file_has_no_huge_pages_and_is_mapped_all_the_same() -> None:
    fd = os.memfd_create("huge-pages-under-test", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, mmap.PAGESIZE)
        pages = HugePages(fd, mmap.PAGESIZE)
        pages.prepare(0, mmap.PAGESIZE)
        os.pwrite(fd, b"abc", 5)
        assert pages.num_pages == 0
        assert bytes(map_shared(fd, mmap.PAGESIZE)[5:8]) == b"abc"
    finally:
        os.close(fd)


def test_a_kernel_that_refuses_is_asked_a_few_times_only(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Refusing:
        mmap = huge_pages._libc.mmap

        @staticmethod
        def madvise(address: int, num_bytes: int, advice: int) -> int:
            asked.append(address)
            ctypes.set_errno(12)
            return -1

    monkeypatch.setattr(huge_pages, "_libc", Refusing)
    monkeypatch.setattr(huge_pages, "_MAX_FAILURES", 2)
    content = os.urandom(SIZE)
    assert fill(memfd, content).num_huge == 0
    assert len(asked) == 2 * 2  # while it is filled, and at the end
    assert map_shared(memfd, SIZE) == content


def test_pages_are_prepared_beside_writers_without_losing_a_byte(memfd: int) -> None:
    content, pages, step = os.urandom(SIZE), HugePages(memfd, SIZE), 70_001

    def write(which: int) -> None:
        for offset in range(which * step, SIZE, 4 * step):
            pages.prepare(offset, min(step, SIZE - offset))
            os.pwrite(memfd, content[offset : offset + step], offset)

    writers = [threading.Thread(target=write, args=(which,)) for which in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    pages.finish()
    assert map_shared(memfd, SIZE) == content


def test_a_file_that_cannot_be_mapped_is_an_error() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="mmap of"):
            map_shared(reader, mmap.PAGESIZE)
    finally:
        os.close(reader)
        os.close(writer)


def test_private_memory_begins_where_a_huge_page_may_and_is_zero_and_writable() -> None:
    memory = private_memory(3 * HUGE_BYTES + 5)
    assert len(memory) == 3 * HUGE_BYTES + 5
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_BYTES == 0
    assert not any(memory[:: mmap.PAGESIZE])
    memory[-1] = 7
    assert memory[-1] == 7
