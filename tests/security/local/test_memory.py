"""References into shared memory that lie, memory that changes while it is used, and more of it than there is."""

import array
import contextlib
import functools
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from normserve.client import Client
from normserve.codec import local_messages as frames
from normserve.codec.local_messages import SegmentRange

from tests.integration.harness.local_wire import HALF, LocalConnection, located, request
from tests.integration.harness.stage import stage_on

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)
SEGMENT = 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("memory") / "normserve.sock"


@pytest.fixture(scope="module")
def local(launched, path):
    return launched("--local", str(path), "--local-bytes", str(2**25))


@pytest.fixture
def connection(local, path):
    with LocalConnection(path) as connection:
        connection.grow()
        yield connection
        assert connection.layer_norm(X).status == 200


def shared_bytes(server) -> float:
    with server.client() as client:
        text = client.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("normserve_local_bytes ")]
    return float(line.split()[1])


@pytest.mark.parametrize(
    ("segment", "offset", "shape"),
    [
        (0, 8, (2, 12)),
        (0, SEGMENT - 80, (2, 12)),
        (0, SEGMENT, (2, 12)),
        (0, SEGMENT - 96 + 16, (2, 12)),
        (0, 2**63 - 16, (2, 12)),
        (0, 2**63 - 1, (1, 1)),
        (0, 0, (2**18 + 1, 1)),
        (0, 16, (2**61 - 1,)),
        (0, 2**62, (2**60,)),
        (1, 0, (2, 12)),
        (2**63 - 1, 0, (2, 12)),
        (2, 0, (0, 12)),
        (0, SEGMENT + 16, (0, 12)),
    ],
)
def test_tensors_and_places_outside_are_refused(connection, segment, offset, shape):
    asked = request(X.shape)
    tensors = {"x": located(shape, offset, segment)}
    answer = connection.request(msgspec.structs.replace(asked, tensors=tensors))
    assert (answer.status, answer.problem["code"]) == (422, "invalid_parameter")
    place = SegmentRange(segment, offset, 4 * int(np.prod(shape, dtype=object)))
    answer = connection.request(msgspec.structs.replace(asked, results={"y": place}))
    assert answer.status == 422


@pytest.mark.parametrize("offset", [0, 16, 80, HALF + 16])
def test_results_that_overlap_are_refused(connection, offset):
    tensors = {"x": located(X.shape), "residual": located(X.shape, HALF)}
    places = {"y": SegmentRange(0, HALF + 16 if offset else 16, 96), "residual_out": SegmentRange(0, offset, 96)}
    answer = connection.request(msgspec.structs.replace(request(X.shape), tensors=tensors, results=places))
    assert (answer.status, answer.problem["code"]) == (422, "invalid_parameter")
    assert "overlap" in answer.problem["detail"]


def test_a_place_that_is_too_small_is_refused(connection):
    answer = connection.request(msgspec.structs.replace(request(X.shape), results={"y": SegmentRange(0, HALF, 95)}))
    assert (answer.status, answer.problem["code"]) == (422, "invalid_shape")


@pytest.mark.parametrize("rows", [2, 200])
def test_x_is_written_over_only_where_the_client_says_so(connection, rows):
    # Of as many rows the server computes in the memory of its clients.
    x = np.random.default_rng(0).standard_normal((rows, 2048 if rows > 2 else 12), dtype=np.float32)
    while len(connection.segments) < 3:
        connection.grow(x.nbytes)
    last = max(connection.segments)
    in_arena = connection.array(last, 0, x.shape)
    in_arena[:] = x
    shown = {"x": located(x.shape, 0, last)}
    asked = msgspec.structs.replace(request(x.shape), tensors=shown)
    elsewhere = connection.request(
        msgspec.structs.replace(asked, results={"y": SegmentRange(last - 1, 0, x.nbytes)})
    )
    assert elsewhere.status == 200
    assert (in_arena == x).all()
    y = connection.array(last - 1, 0, x.shape).copy()
    over = connection.request(msgspec.structs.replace(asked, results={"y": SegmentRange(last, 0, x.nbytes)}))
    assert over.status == 200
    assert (in_arena == y).all()


def test_a_segment_of_another_connection_is_nobodys(connection, path):
    with LocalConnection(path) as other:
        assert other.layer_norm(X).status == 200
        assert other.grow() == 1
        answer = connection.request(
            msgspec.structs.replace(request(X.shape), tensors={"x": located((2, 12), 0, 1)})
        )
        assert answer.status == 422
        connection.send(frames.FreeSegmentMessage(1))
        assert other.request(request((2, 12), segment=1)).status == 200


def test_segments_that_are_given_back_are_gone(connection, until, settled, local):
    before = settled(lambda: shared_bytes(local))
    number = connection.grow()
    kept = connection.array(number, 0, (4,))
    kept[:] = 3
    connection.send(frames.FreeSegmentMessage(number))
    connection.send(frames.FreeSegmentMessage(number))
    assert connection.request(request((2, 12), segment=number)).status == 422
    until(lambda: shared_bytes(local) == before)
    # What this process still maps holds nothing any more, and no memory of the server's.
    until(lambda: (kept == 0).all())


def test_descriptors_that_nobody_asked_for_are_not_taken(connection, settled, until, local):
    before = settled(lambda: local.descriptors())
    for _ in range(100):
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        connection.socket.sendmsg([frames.encode_frame(1, frames.CancelRequestMessage(0))], sent)
    assert connection.layer_norm(X).status == 200
    until(lambda: local.descriptors() == before)


def test_a_segment_cannot_be_shrunk_or_grown(connection):
    connection.send(frames.GrowArenaMessage(SEGMENT), 5)
    _, rights, _, _ = connection.socket.recvmsg(2**16, 1024)
    descriptor = array.array("i", rights[0][2])[0]
    try:
        for size in (0, 2**30):
            with pytest.raises(OSError):  # noqa: PT011
                os.ftruncate(descriptor, size)
        assert os.fstat(descriptor).st_size == SEGMENT
    finally:
        os.close(descriptor)


def test_quotas_are_a_users_and_hold_for_who_disconnects_and_lives_on(connection, path, local, until, settled):
    program = (
        "import sys\n"
        "from normserve.codec import local_messages as frames\n"
        "from tests.integration.harness.local_wire import LocalConnection\n"
        "statuses, kept = [], []\n"
        "for _ in range(12):\n"
        "    other = LocalConnection(sys.argv[1])\n"
        "    other.send(frames.GrowArenaMessage(2**22), 1)\n"
        "    statuses.append(other.receive()[1].status)\n"
        "    other.close()\n"
        "other = LocalConnection(sys.argv[1])\n"
        "other.send(frames.GrowArenaMessage(2**24), 1)\n"
        "print(*statuses, other.receive()[1].retry_after_s, flush=True)\n"
        "sys.stdin.read()\n"
    )
    before = settled(lambda: shared_bytes(local))
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        *statuses, retry_after_s = process.stdout.readline().split()
        assert statuses[:6] == ["200"] * 6
        assert statuses[-4:] == ["429"] * 4
        # Only what others hold may be free later.
        assert retry_after_s == "None"
        refused = [connection.request(frames.GrowArenaMessage(nbytes)) for nbytes in (2**22, 2**25)]
        assert [(each.status, each.retry_after_s) for each in refused] == [(429, 5), (429, None)]
        assert connection.request(frames.GrowArenaMessage(2**30)).status == 413
        assert connection.request(frames.GrowArenaMessage(2**63 - 1)).status == 413
        process.stdin.close()
    until(lambda: shared_bytes(local) == before)


def test_tensors_that_change_while_they_are_read_harm_their_owner_alone(connection, path):
    x = np.ones((64, 1024), np.float32)
    for other in (connection, victim := LocalConnection(path)):
        other.layer_norm(x)
    expected = victim.y(x.shape)
    stop = threading.Event()

    def disturb():
        noise = np.random.default_rng(0).integers(0, 255, SEGMENT, np.uint8)
        while not stop.is_set():
            connection.array(0, 0, (SEGMENT,), np.uint8)[:] = noise

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(50):
            assert connection.request(request(x.shape)).status == 200
            assert victim.request(request(x.shape)).status == 200
            assert (victim.y(x.shape) == expected).all()
    finally:
        stop.set()
        thread.join()
        victim.close()


def test_weights_that_change_after_admission_change_no_launch(launched, tmp_path, until):
    def parameters(connection, shape, value):
        connection.array(0, 2**18, shape)[:] = value
        return {"bias": located(shape, 2**18)}

    path = tmp_path / "stage.sock"
    x = np.ones((1, 16), np.float32)
    with contextlib.ExitStack() as stack:
        start = functools.partial(launched, "--local", str(path))
        stage = stack.enter_context(stage_on(start, tmp_path / "gate", until))
        evil, victim = (stack.enter_context(LocalConnection(path)) for _ in range(2))
        running = stage.occupy_device()
        for each in (evil, victim):
            each.grow()
            each.array(0, 0, x.shape)[:] = x
            tensors = {"x": located(x.shape)} | parameters(each, (16,), 7)
            each.send(msgspec.structs.replace(request(x.shape), tensors=tensors), 1)
        stage.wait_for_queue(2)
        evil.array(0, 2**18, (16,))[:] = 666
        stage.open_gate()
        assert [each.receive()[1].batch_size for each in (evil, victim)] == [2, 2]
        assert (victim.y(x.shape) == 7).all()
        assert (evil.y(x.shape) == 7).all()
        running.result(20)


def test_only_the_servers_user_may_connect(local, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(
    ("listed", "uid", "answer"), [("1234", 1234, "422"), ("1234", 1235, "403"), ("1234,65534", 65534, "403")]
)
def test_other_users_connect_if_they_are_listed(start_server, listed, uid, answer):
    program = (
        "import json, socket, struct, sys\n"
        "client = socket.socket(socket.AF_UNIX); client.connect(sys.argv[1])\n"
        "content = json.dumps({'do': 'hello', 'version': 99}).encode()\n"
        "try: client.sendall(struct.pack('<II', len(content), 1) + content)\n"
        "except BrokenPipeError: pass\n"
        "print(json.loads(client.recv(65536)[8:])['status'])\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "normserve.sock"
        start_server("--local", str(path), "--local-users", listed)
        told = subprocess.run(
            ["/usr/bin/env", "python3", "-c", program, str(path)],
            user=uid,
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
        )
        assert told.stdout.strip() == answer, told.stderr


def test_a_connection_too_many_is_told_so(launched, tmp_path_factory, until):
    path = tmp_path_factory.mktemp("few") / "normserve.sock"
    launched("--local", str(path), "--local-connections", "2")
    with LocalConnection(path), LocalConnection(path):
        refused = LocalConnection(path, greet=False)
        tag, answer = refused.receive()
        assert (tag, answer.status, answer.problem["code"]) == (0, 503, "too_many_connections")
        refused.close()

    def is_served():
        with Client(f"unix://{path}") as client:
            return client.layer_norm(X).y.shape == X.shape

    until(is_served)
