"""Shared memory: of whole pages, of zeros, of a size that nobody changes; two mappings are one memory."""

import fcntl
import gc
import os

import pytest
from normserve.memory import host_segments
from normserve.memory.host_segments import PAGE_BYTES, HostSegment, make_segment, map_segment


@pytest.fixture
def made():
    descriptor, segment = make_segment(PAGE_BYTES + 1, HostSegment)
    yield descriptor, segment
    os.close(descriptor)


def test_two_mappings_are_one_memory_until_it_is_discarded(made):
    descriptor, segment = made
    other = map_segment(descriptor)
    assert len(segment) == len(other) == 2 * PAGE_BYTES
    assert bytes(segment) == bytes(2 * PAGE_BYTES)
    segment[5] = 7
    assert other[5] == 7
    segment.discard_content()
    assert other[5] == 0


def test_nobody_changes_its_size_or_makes_a_program_of_it(made):
    descriptor, _ = made
    for nbytes in (0, PAGE_BYTES, 2**30):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(descriptor)


def test_all_of_its_pages_are_there_from_the_beginning(made):
    descriptor, segment = made
    assert os.fstat(descriptor).st_blocks * 512 == len(segment)


def test_a_view_keeps_it_mapped():
    descriptor, segment = make_segment(PAGE_BYTES, HostSegment)
    os.close(descriptor)
    view = memoryview(segment)[:16]
    del segment
    gc.collect()
    view[0] = 1
    assert view[0] == 1


def test_what_could_shrink_is_not_mapped(tmp_path):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, PAGE_BYTES)
        with pytest.raises(ValueError, match="sealed"):
            map_segment(descriptor)
    finally:
        os.close(descriptor)
    with (tmp_path / "file").open("wb+") as file, pytest.raises(ValueError, match="not of shared memory"):
        map_segment(file.fileno())


def test_only_as_much_as_is_asked_for_is_mapped(made):
    descriptor, _ = made
    assert len(map_segment(descriptor, PAGE_BYTES)) == PAGE_BYTES
    with pytest.raises(ValueError, match="at least"):
        map_segment(descriptor, 2 * PAGE_BYTES + 1)


def test_huge_pages_are_not_mapped():
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    try:
        os.ftruncate(descriptor, 2**30)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(ValueError, match="huge pages"):
            map_segment(descriptor)
    finally:
        os.close(descriptor)


def test_more_than_there_is_is_a_memory_error(monkeypatch):
    assert PAGE_BYTES < host_segments.read_available_bytes() < 2**50
    monkeypatch.setattr(host_segments, "read_available_bytes", lambda: 3 * PAGE_BYTES)
    with pytest.raises(MemoryError):
        make_segment(3 * PAGE_BYTES + 1, HostSegment)
