"""Regions by name, and the files that they are parts of."""

import gc
import mmap
import os
import socket
import stat
from pathlib import Path

import pytest
from normserve.errors import OverloadedError, UnusableRegionError
from normserve.http.oip.regions.file_regions import SHARED_MEMORY, SharedMemoryFolder
from normserve.http.oip.regions.region_registry import RegionRegistry

KEY = "ns-a"


@pytest.fixture
def folder(tmp_path):
    folder = SharedMemoryFolder("ns-", tmp_path)
    yield folder
    folder.close()


@pytest.fixture
def regions(folder):
    return RegionRegistry(folder, max_bytes=1000, max_regions=4)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / KEY
    path.write_bytes(bytes(range(100)))
    return path


def register(regions, name="r", key=KEY, start=0, nbytes=100, owner=None):
    regions.register_region(owner, name, regions.open_file_region(name, key, start, nbytes))


def read(span) -> bytes:
    into = bytearray(span.nbytes)
    span.region.read(span.offset, memoryview(into))
    return bytes(into)


def descriptors() -> int:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("key", [KEY, "/" + KEY])
def test_reads_and_writes_what_the_name_stands_for(regions, path, key):
    register(regions, key=key, start=10, nbytes=50)
    span = regions.find_range(None, "r", 5, 20)
    assert read(span) == bytes(range(15, 35))
    span.region.write(span.offset, memoryview(b"new"))
    assert path.read_bytes()[14:19] == bytes([14, *b"new", 18])
    assert regions.describe_regions(None, "system") == [{"name": "r", "key": key, "offset": 10, "byte_size": 50}]


def test_what_multiprocessing_makes_can_be_registered():
    shared = SHARED_MEMORY / f"ns-{os.getpid()}"
    shared.write_bytes(b"x" * 8)
    folder = SharedMemoryFolder("ns-")
    try:
        assert folder.open_region(shared.name, 0, 8).nbytes == 8
    finally:
        shared.unlink()
        folder.close()


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        ".",
        "..",
        "../ns-a",
        "//ns-a",
        "ns-a/",
        "ns-a/b",
        "/dev/shm/ns-a",
        "ns-/../ns-a",
        "ns-a\0",
        "\0ns-a",
        "ns-a\n",
        "ns%2da",
        "%2fns-a",
        "ns-%2e%2e%2fx",
        "other",
        "NS-a",
        "ns-é",
        "ns-\udc80",
        "ns-" + "a" * 250,
    ],
)
def test_only_one_component_with_the_prefix_is_a_key(regions, path, key):
    with pytest.raises(UnusableRegionError, match="a key must begin with 'ns-'"):
        register(regions, key=key)


def symlink(path: Path) -> None:
    path.symlink_to(path.parent / KEY)


def hard_link(path: Path) -> None:
    path.hardlink_to(path.parent / KEY)


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def of_another_user(path: Path) -> None:
    path.write_bytes(bytes(100))
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("only root gives files away")


@pytest.mark.parametrize(
    "make",
    [symlink, hard_link, os.mkfifo, socket_file, device, of_another_user, Path.mkdir, lambda path: None],
    ids=["symlink", "hard link", "fifo", "socket", "device", "of another user", "folder", "nothing"],
)
def test_nothing_but_a_file_of_this_user_is_opened(regions, path, make):
    make(path.parent / "ns-b")
    before = descriptors()
    with pytest.raises(UnusableRegionError) as refused:
        register(regions, key="ns-b", nbytes=1)
    # A client is not told which files there are.
    assert refused.value.detail == "the key is of no shared memory that this server may use"
    del refused
    assert descriptors() == before


def test_what_this_process_has_mapped_is_not_opened(regions, path):
    with (
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0),
        pytest.raises(UnusableRegionError, match="no shared"),
    ):
        register(regions)
    register(regions)


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 101), (1, 100), (101, 0), (0, 0), (2**63 - 1, 2**63 - 1), (2**64 - 50, 100), (100, 1)]
)
def test_a_region_lies_within_its_file(regions, path, start, nbytes):
    with pytest.raises(UnusableRegionError, match="within its file"):
        register(regions, start=start, nbytes=nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 51), (50, 1), (51, 0), (2**63 - 1, 2), (2**64 - 25, 50), (-1, 1), (2**64, -(2**64))]
)
def test_a_span_lies_within_its_region(regions, path, offset, nbytes):
    register(regions, start=25, nbytes=50)
    with pytest.raises(UnusableRegionError, match="do not lie within the 50 bytes"):
        regions.find_range(None, "r", offset, nbytes)


def test_a_file_that_shrinks_is_an_error_wherever_it_does(regions, path):
    register(regions)
    span = regions.find_range(None, "r", 50, 50)
    os.truncate(path, 60)
    with pytest.raises(UnusableRegionError, match="become 60 bytes"):
        regions.find_range(None, "r", 50, 50)
    with pytest.raises(UnusableRegionError, match="become shorter"):
        read(span)
    with pytest.raises(UnusableRegionError, match="become 60 bytes"):
        span.region.write(span.offset, memoryview(bytes(50)))
    assert path.stat().st_size == 60
    assert read(regions.find_range(None, "r", 10, 20)) == bytes(range(10, 30))


def test_a_file_that_grows_shows_no_more_of_itself(regions, path):
    register(regions)
    os.truncate(path, 1000)
    with pytest.raises(UnusableRegionError, match="do not lie within the 100 bytes"):
        regions.find_range(None, "r", 0, 101)


def test_a_file_that_is_removed_or_replaced_stays_what_it_was(regions, path):
    register(regions)
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert read(regions.find_range(None, "r", 0, 100)) == bytes(range(100))


def test_a_name_is_taken_once(regions, path):
    register(regions)
    with pytest.raises(UnusableRegionError, match="unregister it first"):
        register(regions, start=5, nbytes=5)
    assert regions.describe_regions(None, "system", "r")[0]["byte_size"] == 100
    assert regions.open_count == 1


def test_a_name_that_is_the_key_of_another_region_is_only_a_name(regions, path):
    (path.parent / "ns-b").write_bytes(b"b" * 10)
    register(regions, name="ns-b", key="ns-a")
    register(regions, name="ns-a", key="ns-b", nbytes=10)
    assert read(regions.find_range(None, "ns-b", 0, 3)) == bytes([0, 1, 2])
    assert read(regions.find_range(None, "ns-a", 0, 3)) == b"bbb"


@pytest.mark.parametrize("name", ["", "a" * 257, "a\0", "a\nb", "\x1b[31m", "\u202e"])
def test_names_are_printable_and_short(regions, path, name):
    with pytest.raises(UnusableRegionError, match="printable"):
        register(regions, name=name)


def test_keys_have_names_of_their_own(regions, path):
    register(regions, owner="one")
    register(regions, owner="two", nbytes=50)
    assert regions.describe_regions("two", "system") == [{"name": "r", "key": KEY, "offset": 0, "byte_size": 50}]
    regions.unregister_regions("two", "system")
    assert regions.find_range("one", "r", 0, 100)
    for owner in ("two", None):
        with pytest.raises(UnusableRegionError, match="no region with the name 'r'"):
            regions.find_range(owner, "r", 0, 1)


def test_what_is_in_use_stays_open_and_counts_until_it_is_not(regions, path):
    before = descriptors()
    register(regions)
    span = regions.find_range(None, "r", 0, 100)
    regions.unregister_regions(None, "system", "r")
    regions.unregister_regions(None, "system", "r")
    regions.unregister_regions(None, "system")
    with pytest.raises(UnusableRegionError, match="no region"):
        regions.find_range(None, "r", 0, 1)
    assert read(span) == bytes(range(100))
    assert (regions.open_count, regions.open_bytes, descriptors()) == (1, 100, before + 1)
    del span
    assert (regions.open_count, regions.open_bytes, descriptors()) == (0, 0, before)


def test_number_and_bytes_are_bounded_and_come_back(regions, path):
    os.truncate(path, 1000)
    before = descriptors()
    for count in range(4):
        register(regions, name=str(count))
    for count in range(30):
        with pytest.raises(OverloadedError, match="no more than 4 regions"):
            register(regions, name=f"more {count}", nbytes=1)
    assert descriptors() == before + 4
    regions.unregister_regions(None, "system", "0")
    with pytest.raises(OverloadedError, match="701 more bytes do not fit beside 300"):
        register(regions, nbytes=701)
    register(regions, nbytes=700)
    regions.unregister_regions(None, "system")
    assert (regions.open_count, regions.open_bytes, descriptors()) == (0, 0, before)


def test_spans_of_one_file_overlap_whatever_they_are_registered_as(regions, path):
    register(regions, name="whole")
    register(regions, name="end", start=50, nbytes=50)
    assert regions.find_range(None, "whole", 40, 20).has_overlap(regions.find_range(None, "end", 0, 5))
    assert not regions.find_range(None, "whole", 40, 10).has_overlap(regions.find_range(None, "end", 0, 5))


def test_without_a_folder_it_says_how_to_switch_it_on():
    regions = RegionRegistry(None, 1000)
    for use in (
        lambda: regions.open_file_region("r", KEY, 0, 1),
        lambda: regions.find_range(None, "r", 0, 1),
        lambda: regions.describe_regions(None, "system", "r"),
    ):
        with pytest.raises(UnusableRegionError, match="--oip-shared-memory PREFIX"):
            use()
    regions.unregister_regions(None, "system")
    assert regions.describe_regions(None, "system") == []
