"""The parked catalog's file: a writer may be killed at any byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preload.daemon import catalog_file
from preload.daemon.catalog_file import MAX_BODY_BYTES, CatalogFile, CatalogFileError, CatalogVersionError


@contextmanager
def new_file() -> Iterator[CatalogFile]:
    file = CatalogFile.create()
    try:
        yield file
    finally:
        os.close(file.fd)


def snapshot(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def file_with(content: bytes) -> CatalogFile:
    file = CatalogFile.create()
    os.pwrite(file.fd, content, 0)
    return CatalogFile(file.fd)


class Tape:
    """Stands in for `os` in catalog_file: keeps the writes it passes on."""

    def __init__(self) -> None:
        self.writes: list[tuple[bytes, int]] = []

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self.writes.append((data, offset))
        return os.pwrite(fd, data, offset)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def recorded_write(file: CatalogFile, body: bytes) -> list[tuple[bytes, int]]:
    tape = Tape()
    catalog_file.os = tape  # type: ignore[attr-defined]
    try:
        file.write(body)
    finally:
        catalog_file.os = os  # type: ignore[attr-defined]
    return tape.writes


def apply_partly(fd: int, writes: list[tuple[bytes, int]], num_bytes: int) -> None:
    """The first `num_bytes` of what was written, as a process killed in between leaves it."""
    for data, offset in writes:
        os.pwrite(fd, data[: max(0, num_bytes)], offset)
        num_bytes -= len(data)


bodies = st.binary(max_size=400)


@given(history=st.lists(bodies, max_size=5), last=bodies, share=st.floats(0, 1), after=bodies)
def test_a_torn_write_leaves_the_old_state_or_the_new(
    history: list[bytes], last: bytes, share: float, after: bytes
) -> None:
    with new_file() as file:
        for body in history:
            file.write(body)
        before = snapshot(file.fd)
        writes = recorded_write(file, last)
    total = sum(len(data) for data, _ in writes)
    torn = file_with(before)
    try:
        apply_partly(torn.fd, writes, int(share * total))
        expected = {last, history[-1]} if history else {last, None}
        try:
            seen = torn.read()
        except CatalogFileError:
            seen = None
        assert seen in expected
        assert share < 1 or seen == last
        torn.write(after)  # and the file is as good as before for whoever goes on with it
        assert CatalogFile(torn.fd).read() == after
    finally:
        os.close(torn.fd)


@given(history=st.lists(bodies, min_size=1, max_size=5), place=st.integers(0, 10_000), junk=st.binary(min_size=1))
def test_corruption_is_never_read_as_content(history: list[bytes], place: int, junk: bytes) -> None:
    with new_file() as file:
        for body in history:
            file.write(body)
        content = bytearray(snapshot(file.fd))
    place %= len(content)
    content[place : place + len(junk)] = junk[: len(content) - place]
    damaged = file_with(bytes(content))
    try:
        assert damaged.read() in history
    except (CatalogFileError, CatalogVersionError):
        pass
    finally:
        os.close(damaged.fd)


@given(history=st.lists(bodies, min_size=1, max_size=5), size=st.integers(0, 6000))
def test_a_truncated_file_is_one_of_its_states_or_none(history: list[bytes], size: int) -> None:
    with new_file() as file:
        for body in history:
            file.write(body)
        os.ftruncate(file.fd, size)
        with suppress(CatalogFileError):
            assert CatalogFile(file.fd).read() in history


def test_what_was_written_is_read_by_the_next_life() -> None:
    with new_file() as file:
        for number in range(50):
            file.write(bytes([number]) * (number * 37 % 300))
            assert CatalogFile(file.fd).read() == bytes([number]) * (number * 37 % 300)


def test_the_file_does_not_grow_with_the_number_of_writes() -> None:
    with new_file() as file:
        for _ in range(200):
            file.write(b"x" * 5000)
        assert os.fstat(file.fd).st_size < 4096 + 3 * 5000


def test_a_file_of_another_format_is_not_misread() -> None:
    with new_file() as file:
        file.write(b"content")
        for place in (0, 512):
            os.pwrite(file.fd, b"PRELOAD2", place)
        with pytest.raises(CatalogVersionError, match="PRELOAD2"):
            CatalogFile(file.fd).read()


def test_an_empty_file_is_refused() -> None:
    with new_file() as file, pytest.raises(CatalogFileError):
        file.read()


def test_a_content_that_could_not_be_read_again_is_not_written() -> None:
    with new_file() as file:
        file.write(b"before")
        with pytest.raises(CatalogFileError):
            file.write(b"x" * (MAX_BODY_BYTES + 1))
        assert CatalogFile(file.fd).read() == b"before"
