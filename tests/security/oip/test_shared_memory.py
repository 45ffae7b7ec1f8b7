"""System shared memory by names: what is not the client's, what lies, and what changes while it is used."""

import contextlib
import functools
import json
import os
import stat
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.integration.harness.misbehaving_server import WAITS
from tests.integration.harness.raw import exchange, head
from tests.integration.harness.stage import stage_on
from tests.integration.harness.wire import assert_alive
from tests.security.keys import EVERYTHING, INFER, LAYERS, METRICS, bearing, write_keys

PREFIX = f"normserve-test-{uuid.uuid4().hex[:8]}-"
SHARED_MEMORY = Path("/dev/shm")
MIB = 2**20
REFUSED = "the key is of no shared memory that this server may use"


@pytest.fixture(scope="module")
def sharing(launched, tmp_path_factory):
    socket = tmp_path_factory.mktemp("local") / "normserve.sock"
    return launched(
        "--oip-shared-memory", PREFIX, "--oip-shared-memory-bytes", str(64 * MIB), "--local", str(socket)
    )


@pytest.fixture
def http(sharing, settled):
    """A client; in the end the server holds what it held before, and answers."""
    with sharing.client() as client:
        assert_alive(client)
        before = settled(functools.partial(held, sharing, client))
        yield client
        assert client.post("/v2/systemsharedmemory/unregister").status_code == 200
        assert_alive(client)
        assert settled(functools.partial(held, sharing, client)) == before


def held(server, client) -> tuple[object, ...]:
    """Descriptors, and what the server says that it has in use."""
    names = ("normserve_inflight_bytes ", 'normserve_slab_bytes{state="used"}', "normserve_oip_region")
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(names)]
    return server.descriptors(), *lines


@pytest.fixture
def made():
    """Makes files of shared memory, which end with the test."""
    paths = []

    def make(name: str = "a", content: bytes | None = bytes(4096)) -> Path:
        path = SHARED_MEMORY / f"{PREFIX}{name}"
        paths.append(path)
        if content is not None:
            path.write_bytes(content)
        return path

    yield make
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def register(http, name="r", key=PREFIX + "a", byte_size=4096, headers=None, **more):
    said = {"key": key, "byte_size": byte_size, **more}
    return http.post(f"/v2/systemsharedmemory/region/{name}/register", json=said, headers=headers)


def in_region(nbytes=4096, offset=0, region="r") -> dict[str, object]:
    return {"shared_memory_region": region, "shared_memory_byte_size": nbytes, "shared_memory_offset": offset}


def infer(http, source=None, target=None, cols=1024, headers=None):
    """One row through LayerNorm; in the body and in the answer, where no region is given."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, cols]}
    given = {"data": [1.0] * cols} if source is None else {"parameters": source}
    wanted = {"name": "y", "parameters": {"binary_data": True} if target is None else target}
    return http.post(
        "/v2/models/layer_norm/infer", json={"inputs": [x | given], "outputs": [wanted]}, headers=headers
    )


def assert_refused(response, told: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert told in response.json()["error"], response.text


@pytest.fixture
def row(made):
    x = np.linspace(-1, 1, 1024, dtype=np.float32)
    return made(content=x.tobytes())


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


@pytest.mark.parametrize("place", ["input", "output"])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (1, 4096),
        (4096, 4096),
        (2**63 - 4096, 4096),
        (2**63 - 1, 4096),
        (2**64 - 2048, 4096),
        (2**64, 4096),
        (-4096, 4096),
        (0, 2**63),
        (0, -1),
        (0, 0),
        (True, 4096),
        (0.0, 4096.0),
    ],
)
def test_a_span_that_its_region_does_not_have_is_refused(http, row, place, offset, nbytes):
    # The file goes on behind the region.
    os.truncate(row, 16384)
    assert register(http).status_code == 200
    lie = in_region(nbytes, offset)
    assert_refused(infer(http, lie) if place == "input" else infer(http, None, lie), "")
    assert row.read_bytes()[4096:] == bytes(16384 - 4096)


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
    assert exchange(sharing.address, announced).status_code == 413


def test_a_body_in_tiny_chunks_is_as_any_other(http, made):
    made()
    text = json.dumps({"key": f"{PREFIX}a", "byte_size": 16}).encode()
    pieces = (bytes([each]) for each in text + b" " * 20_000)
    assert http.post("/v2/systemsharedmemory/region/r/register", content=pieces).status_code == 200


def test_regions_without_end_are_told_to_come_back(http, sharing, made):
    made()
    statuses = [register(http, f"r{number}", byte_size=1).status_code for number in range(1100)]
    assert statuses == [200] * 1024 + [429] * 76
    assert http.post("/v2/systemsharedmemory/region/r5/unregister").status_code == 200
    assert register(http, "again", byte_size=1).status_code == 200
    assert http.post("/v2/systemsharedmemory/unregister").status_code == 200
    with made("large").open("r+b") as file:
        file.truncate(2**40)
    refused = register(http, key=PREFIX + "large", byte_size=64 * MIB + 1)
    assert_refused(refused, "more bytes do not fit", 429)
    assert int(refused.headers["retry-after"]) >= 1


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


def test_a_file_that_is_removed_and_replaced_is_not_followed(http, row):
    register(http)
    row.unlink()
    row.symlink_to("/etc/passwd")
    assert infer(http, in_region()).status_code == 200
    assert_refused(register(http, "again"), REFUSED)


def test_a_region_whose_file_shrinks_or_grows_all_the_time(http, row):
    """A mapping would end the process with SIGBUS."""
    register(http)
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            for length in (0, 4096, 100, 65536, 4095):
                os.truncate(row, length)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        answers = [infer(http, in_region(), in_region()) for _ in range(150)]
    finally:
        ended.set()
        changing.join()
    assert {each.status_code for each in answers} <= {200, 400}
    for each in answers:
        if each.status_code == 400:
            assert_refused(each, "the region's file ")
    # What had become shorter was not made longer again.
    os.truncate(row, 10)
    assert_refused(infer(http, None, in_region()), "has become 10 bytes long")
    assert row.stat().st_size == 10


def test_tensors_that_change_while_they_are_used_are_computed_once(http, row):
    register(http)
    ended = threading.Event()

    def change() -> None:
        with row.open("r+b", buffering=0) as file:
            while not ended.is_set():
                for value in (1, 0xFF, 0x7F):
                    os.pwrite(file.fileno(), bytes([value]) * 4096, 0)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        assert {infer(http, in_region()).status_code for _ in range(50)} == {200}
    finally:
        ended.set()
        changing.join()


@pytest.fixture(scope="module")
def waiting(launched, tmp_path_factory, until):
    gate = tmp_path_factory.mktemp("stage") / "gate"
    start = functools.partial(launched, "--oip-shared-memory", PREFIX)
    with stage_on(start, gate, until) as stage:
        yield stage


@pytest.fixture
def computing(waiting, made):
    """A request whose tensor and result are in regions, while it is computed; called, it lets it end."""
    waiting.gate.unlink(missing_ok=True)
    source, target = made("x", np.ones(WAITS, np.float32).tobytes()), made("y", b"\xff" * 4 * WAITS)
    for name in ("x", "y"):
        assert register(waiting.http, name, PREFIX + name, 4 * WAITS).status_code == 200
    before = waiting.server.log.count("waiting")
    spans = [in_region(4 * WAITS, 0, name) for name in ("x", "y")]
    running = waiting.later(infer, waiting.http, *spans, cols=WAITS)
    waiting.until(lambda: waiting.server.log.count("waiting") > before)

    def end():
        waiting.open_gate()
        return running.result(20)

    yield source, target, end
    waiting.http.post("/v2/systemsharedmemory/unregister")


def test_unregistering_under_a_running_request_waits_for_it(waiting, computing):
    source, target, end = computing
    http = waiting.http
    for path in ("region/x/unregister", "region/y/unregister", "unregister"):
        assert http.post(f"/v2/systemsharedmemory/{path}").status_code == 200
    assert http.get("/v2/systemsharedmemory/status").json() == []
    assert_refused(infer(http, in_region(region="x")), "no region with the name 'x'")
    # The name is free at once, and what it stands for now is nothing to the request.
    other = source.with_name(PREFIX + "a")
    other.write_bytes(bytes(4 * WAITS))
    assert register(http, "y", PREFIX + "a", 4 * WAITS).status_code == 200
    assert "normserve_oip_regions 3.0" in http.get("/metrics").text
    with target.open("rb") as written:
        for path in (source, target):
            path.unlink()
        assert end().status_code == 200
        assert written.read() == bytes(4 * WAITS)
    assert other.read_bytes() == bytes(4 * WAITS)
    other.unlink()
    waiting.until(lambda: "normserve_oip_regions 1.0" in http.get("/metrics").text)


def test_a_target_that_goes_under_a_running_request_is_an_error_and_no_more(waiting, computing):
    _, target, end = computing
    os.truncate(target, 7)
    assert_refused(end(), "has become 7 bytes long")
    assert target.read_bytes() == b"\xff" * 7
    assert_alive(waiting.http)


def test_regions_count_as_bodies_do(launched, made):
    server = launched(
        "--oip-shared-memory", PREFIX, "--max-inflight-bytes", str(4 * MIB), "--max-body-bytes", "2000000"
    )
    with made().open("r+b") as file:
        file.truncate(16 * MIB)
    with server.client() as http:
        register(http, byte_size=16 * MIB)
        for nbytes in (2 * MIB, 16 * MIB):
            assert_refused(infer_sparse(http, nbytes), "a body must be at most 2000000 bytes", 413)
        assert infer_sparse(http, MIB).status_code == 200
        assert_alive(http)


def infer_sparse(http, nbytes):
    x = {"name": "x", "datatype": "FP32", "shape": [nbytes // 4096, 1024], "parameters": in_region(nbytes)}
    y = {"name": "y", "parameters": in_region(nbytes)}
    return http.post("/v2/models/layer_norm/infer", json={"inputs": [x], "outputs": [y]})


@pytest.fixture(scope="module")
def keyed(launched, tmp_path_factory):
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    server = launched("--oip-shared-memory", PREFIX, "--api-keys-file", str(keys))
    with server.client() as client:
        yield client


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), (LAYERS, 403), (METRICS, 403)])
@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_no_way_to_shared_memory_goes_past_the_key(keyed, kind, key, status):
    root = f"/v2/{kind}sharedmemory"
    for method, path in (
        ("POST", "/region/r/register"),
        ("POST", "/region/r/unregister"),
        ("POST", "/unregister"),
        ("GET", "/region/r/status"),
        ("GET", "/status"),
    ):
        for each in (root + path, (root + path).replace("shared", "%73hared")):
            assert keyed.request(method, each, headers=bearing(key)).status_code == status, each


def test_regions_of_one_key_are_nothing_to_another(keyed, row):
    ours, theirs = bearing(INFER), bearing(EVERYTHING)
    assert register(keyed, headers=ours).status_code == 200
    assert keyed.get("/v2/systemsharedmemory/status", headers=theirs).json() == []
    assert_refused(infer(keyed, in_region(), headers=theirs), "no region with the name 'r'")
    assert_refused(infer(keyed, None, in_region(), headers=theirs), "no region with the name 'r'")
    for path in ("region/r/unregister", "unregister"):
        assert keyed.post(f"/v2/systemsharedmemory/{path}", headers=theirs).status_code == 200
    assert infer(keyed, in_region(), in_region(), headers=ours).status_code == 200
