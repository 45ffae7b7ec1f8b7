"""System shared memory by names: what is not the client's, and what is registered otherwise than it may be."""

import functools
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from tests.integration.harness.raw import answered, exchange, head
from tests.security.oip.regions import (
    PREFIX,
    REFUSED,
    SHARED_MEMORY,
    assert_refused,
    in_region,
    infer,
    register,
)


def test_the_server_has_no_memory_that_a_name_could_be_leaked_of(http, sharing, made, row):
    register(http)
    assert infer(http, in_region()).status_code == 200
    process = Path(f"/proc/{sharing.owner}")
    # What is mapped or open there has no name below the folder, but for what clients have registered.
    assert str(SHARED_MEMORY) not in (process / "maps").read_text()
    opened = {str(each.readlink()) for each in (process / "fd").iterdir() if os.path.lexists(each)}
    below = {each for each in opened if each.startswith(f"{SHARED_MEMORY}/")}
    assert below == {str(row)}
    for key in (f"memfd:{PREFIX}", f"{process}/fd/5", "/proc/self/fd/5", f"../proc/self/maps{PREFIX}"):
        assert_refused(register(http, "other", key), "a key must begin with")


def test_memory_of_the_server_is_refused_whatever_it_is_called(start_server, made):
    path = made()
    script = str(Path(__file__).with_name("mapping_server.py"))
    server = start_server("--oip-shared-memory", PREFIX, env={"MAPPED": str(path)}, script=script)
    assert str(path) in Path(f"/proc/{server.owner}/maps").read_text()
    made("b")
    with server.client() as http:
        assert_refused(register(http), REFUSED)
        assert register(http, key=PREFIX + "b").status_code == 200


def link_to(target: Path | str, path: Path) -> None:
    path.symlink_to(target)


def hard_link(path: Path) -> None:
    path.hardlink_to(SHARED_MEMORY / f"{PREFIX}a")


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def of_another_user(path: Path) -> None:
    path.write_bytes(bytes(4096))
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("only root gives files away")
    path.chmod(0o666)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(link_to, f"{PREFIX}a"),
        functools.partial(link_to, "/etc/passwd"),
        functools.partial(link_to, "/proc/self/mem"),
        hard_link,
        os.mkfifo,
        device,
        of_another_user,
        Path.mkdir,
        lambda path: None,
    ],
    ids=[
        "link",
        "link to a file",
        "link to memory",
        "hard link",
        "fifo",
        "device",
        "another's",
        "folder",
        "nothing",
    ],
)
def test_what_is_no_file_of_this_user_is_refused_in_the_same_words(http, made, make):
    made()
    make(made("b", content=None))
    assert_refused(register(http, key=PREFIX + "b", byte_size=1), REFUSED)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "..",
        "PREFIX-a/",
        "../shm/PREFIX-a",
        "//PREFIX-a",
        "PREFIX-a/../PREFIX-a",
        "/dev/shm/PREFIX-a",
        "PREFIX-a\0",
        "\0PREFIX-a",
        "PREFIX-%61",
        "%2e%2e%2fPREFIX-a",
        "PREFIX-%00a",
        "PREFIX-a\n",
        "PREFIX-" + "a" * 300,
        "NORMSERVE-TEST-a",
        "passwd",
    ],
)
def test_a_key_is_one_name_with_the_prefix(http, made, key):
    made()
    # Which one it is differs from run to run, and names of tests must not.
    key = key.replace("PREFIX-", PREFIX)
    assert_refused(register(http, key=key), "a key must begin with")


@pytest.mark.parametrize(
    ("region", "status"),
    [
        # Names and no more: nothing is opened by them.
        ("..", 200),
        ("%2e%2e", 200),
        ("%ff%fe", 200),
        ("%2fetc%2fpasswd", 404),
        ("a%2fb", 404),
        ("", 404),
        ("%00", 400),
        ("a%0d%0aset-cookie:%20a", 400),
        ("%1b[31m", 400),
        ("a" * 257, 400),
    ],
)
def test_a_name_in_the_path_is_one_printable_word(http, sharing, made, region, status):
    made()
    text = json.dumps({"key": f"{PREFIX}a", "byte_size": 16}).encode()
    path = f"/v2/systemsharedmemory/region/{region}/register"
    answer = exchange(sharing.address, head(path, f"Content-Length: {len(text)}", "Connection: close") + text)
    assert answer.status_code == status
    told = http.get("/v2/systemsharedmemory/status").json()
    assert [each["key"] for each in told] == ([f"{PREFIX}a"] if status == 200 else [])


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [
        (0, 4097),
        (4096, 1),
        (4097, 0),
        (0, 0),
        (2**63 - 1, 1),
        (2**63 - 1, 2**63 - 1),
        (2**64 - 1, 2),
        (1, 2**64 - 1),
        (2**64, 2**64),
        (10**300, 1),
        (-1, 2),
        (4096, -4096),
        (0.0, 16),
        (True, 16),
        ("0", 16),
        (None, 16),
        (0, [16]),
    ],
)
def test_a_region_that_its_file_does_not_have_is_refused(http, made, offset, byte_size):
    made()
    assert_refused(register(http, offset=offset, byte_size=byte_size), "")
    assert http.get("/v2/systemsharedmemory/status").json() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"key":',
        b'{"key":"a","key":"b"}',
        b'{"key": 1, "byte_size": 1}',
        b'{"key": "a", "byte_size": 1, "ofset": 1}',
        b'{"key": "\xff", "byte_size": 1}',
        b'{"key": "\\ud800", "byte_size": 1}',
        b"[" * 60_000,
        b'{"key": "a", "byte_size": ' + b"9" * 60_000 + b"}",
    ],
    ids=range(12),
)
def test_what_registers_nothing_is_refused(http, body):
    assert_refused(http.post("/v2/systemsharedmemory/region/r/register", content=body), "")


def test_a_long_body_is_refused_unread(http, sharing):
    announced = head("/v2/systemsharedmemory/region/r/register", "Content-Length: 65537")
    assert answered(sharing.address, announced).status_code == 413


def test_a_body_in_tiny_chunks_is_as_any_other(http, made):
    made()
    text = json.dumps({"key": f"{PREFIX}a", "byte_size": 16}).encode()
    pieces = (bytes([each]) for each in text + b" " * 20_000)
    assert http.post("/v2/systemsharedmemory/region/r/register", content=pieces).status_code == 200


def test_names_that_are_keys_of_others_are_only_names(http, made, row):
    made("b", b"\1" * 4096)
    assert register(http, PREFIX + "b", PREFIX + "a").status_code == 200
    assert register(http, PREFIX + "a", PREFIX + "b").status_code == 200
    assert_refused(register(http, PREFIX + "a", PREFIX + "a"), "unregister it first")
    target = in_region(region=PREFIX + "a")
    assert infer(http, in_region(region=PREFIX + "b"), target).status_code == 200
    assert row.read_bytes() == np.linspace(-1, 1, 1024, dtype=np.float32).tobytes()
    # A kind is no second way to a name.
    for name in (PREFIX + "a", PREFIX + "b"):
        assert http.post(f"/v2/cudasharedmemory/region/{name}/unregister").status_code == 200
    assert len(http.get("/v2/systemsharedmemory/status").json()) == 2
