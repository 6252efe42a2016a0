import fcntl
import mmap
import os

import pytest

from preload.daemon.segments.host import HostSegment


@pytest.fixture
def sealed() -> HostSegment:
    segment = HostSegment.allocate(8192, "test")
    with mmap.mmap(segment.fd, 8192) as writable:
        writable[:4] = b"data"
    segment.seal()
    return segment


def test_sealed_segment_can_be_read(sealed: HostSegment) -> None:
    with mmap.mmap(sealed.fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert view[:4] == b"data"


def test_sealed_segment_cannot_be_mapped_writable(sealed: HostSegment) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(sealed.fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_sealed_segment_cannot_be_written_resized_or_punched(sealed: HostSegment) -> None:
    with pytest.raises(PermissionError):
        os.pwrite(sealed.fd, b"evil", 0)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(sealed.fd, size)


def test_no_seal_can_be_added_by_a_consumer(sealed: HostSegment) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(sealed.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_segment_cannot_be_resized_while_it_is_filled() -> None:
    segment = HostSegment.allocate(8192, "test")
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    segment.close()
    segment.close()  # idempotent


@pytest.mark.parametrize("name", ["x" * 1000, "ü" * 1000, "🙂" * 62, "a\0b", "\udcff"])
def test_any_name_of_a_checkpoint_will_do(name: str) -> None:
    segment = HostSegment.allocate(4096, name)
    link = os.readlink(f"/proc/self/fd/{segment.fd}".encode())
    segment.close()
    assert link.startswith(b"/memfd:preload:")
