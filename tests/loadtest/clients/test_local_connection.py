"""The connection that shares memory, against a server of a few lines that does as it is told."""

import json
import os
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from normload.adapters.native import NativeAdapter
from normload.clients.local_connection import _MAX_RETAINED_BYTES, LocalLoadConnection
from normload.clients.prepared_requests import prepare_request
from normload.clients.request_sender import RequestSender
from normload.clients.response_checker import ResponseChecker
from normload.load.request_cases import RequestCase
from normload.load.scenarios import LoadPhase
from normload.load.schedules import ArrivalGenerator, ClosedLoopSchedule
from normserve.client import ConnectionFailedError, DType, RequestTimeoutError, UnexpectedAnswerError
from normserve.client.http.server_address import ServerAddress
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader
from normserve.memory.host_segments import HostSegment, make_segment

from tests.loadtest.conftest import wait_for

SHARED = ServerAddress.parse_url("unix:///nowhere")


def request(rows=4, seed=0):
    return prepare_request(
        RequestCase("layer_norm", (rows, 64), DType.FLOAT32, seed=seed), NativeAdapter(), SHARED, None
    )


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


class LocalServer:
    """Answers in another thread.  `before` may return an answer in place of the right one, or do what it likes."""

    def __init__(self, path):
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.counts = Counter()
        self.asked = []
        self.before = lambda message, connected: None
        threading.Thread(target=self._serve, daemon=True).start()

    def connection(self, timeout_s=5.0, api_key=None):
        return LocalLoadConnection(self.path, api_key, timeout_s)

    def _serve(self):
        while True:
            try:
                connected, _ = self.listener.accept()
            except OSError:
                return
            self.counts["accepted"] += 1
            threading.Thread(target=self._attend, args=(connected,), daemon=True).start()

    def _attend(self, connected):
        coming, segments = FrameReader(frames.MAX_FRAME_BYTES), []
        with connected:
            while data := connected.recv(2**16):
                for tag, content in coming.feed(data):
                    (message,) = frames.decode_messages(content)
                    self.counts[type(message).__name__] += 1
                    # Whoever has left may have said something before.
                    with suppress(OSError):
                        self._answer(connected, tag, message, segments)
        self.counts["ended"] += 1

    def _answer(self, connected, tag, message, segments):
        answer = self.before(message, connected) or frames.LocalResponse(200)
        if isinstance(message, frames.FreeSegmentMessage):
            return
        if answer.status == 200 and isinstance(message, frames.GrowArenaMessage):
            descriptor, segment = make_segment(message.nbytes, HostSegment)
            segments.append(np.frombuffer(segment, np.uint8))
            answer.segment = len(segments) - 1
            socket.send_fds(connected, [frames.encode_frame(tag, answer)], [descriptor])
            os.close(descriptor)
            return
        if answer.status == 200 and isinstance(message, frames.ComputeMessage):
            self.asked.append(message)
            given = {name: _view(segments, each) for name, each in message.tensors.items()}
            x, place = message.tensors["x"], message.results["y"]
            answer.results = {"y": frames.TensorReference(place.segment, place.offset, x.dtype, x.shape)}
            _view(segments, answer.results["y"])[:] = layer_norm(**given)
        connected.sendall(frames.encode_frame(tag, answer))


def _view(segments, located):
    nbytes = int(np.prod(located.shape)) * 4
    memory = segments[located.segment][located.offset : located.offset + nbytes]
    return memory.view(np.float32).reshape(located.shape)


@pytest.fixture
def server(tmp_path):
    made = LocalServer(tmp_path / "s")
    yield made
    made.listener.close()


@pytest.fixture
def connection(server):
    made = server.connection()
    yield made
    made.close()


def exchanged(connection, asked):
    return connection.run_steps(connection.exchange_in_steps(asked))


def right(asked):
    return ResponseChecker(NativeAdapter(), [asked])


def test_a_request_that_comes_again_is_the_same_bytes_in_the_same_memory(server, connection):
    asked = request()
    for _ in range(3):
        answer = exchanged(connection, asked)
        assert (answer.status, answer.nbytes) == (200, 4 * 64 * 4)
        assert right(asked).find_fault(0, answer) is None
    assert (server.counts["accepted"], server.counts["HelloMessage"], server.counts["GrowArenaMessage"]) == (
        1,
        1,
        1,
    )
    assert server.asked[0] == server.asked[1] == server.asked[2]


def test_an_answer_that_is_left_keeps_its_results(server, connection):
    asked, other = request(), request(seed=1)
    answer = exchanged(connection, asked)
    connection.detach_response()
    before = [bytes(each) for each in answer.list_payload_buffers()]
    for each in (asked, other, asked):
        exchanged(connection, each)
    assert [bytes(each) for each in answer.list_payload_buffers()] == before
    assert server.asked[0].results != server.asked[1].results


def test_the_results_of_one_that_is_not_left_are_used_again(server, connection):
    answer = exchanged(connection, request())
    exchanged(connection, request(seed=1))
    assert answer.nbytes == 4 * 64 * 4
    with pytest.raises(UnexpectedAnswerError):
        answer.list_payload_buffers()


def test_requests_that_are_too_many_to_stay_make_place_for_one_another(server, connection):
    rows = _MAX_RETAINED_BYTES // (4 * 64 * 4)
    pool = [request(rows, seed) for seed in range(4)]
    for asked in pool:
        assert right(asked).find_fault(0, exchanged(connection, asked)) is None
    # Two of them never lie there at once; the first place is too small or just right.
    assert server.counts["GrowArenaMessage"] <= 2


def test_the_arena_is_given_back_at_the_end(server, connection):
    exchanged(connection, request())
    connection.close()
    wait_for(lambda: server.counts["ended"] == 1)
    assert server.counts["FreeSegmentMessage"] == server.counts["GrowArenaMessage"] == 1


def test_an_arena_that_the_server_may_write_to_is_not_given_back(server):
    gate = threading.Event()
    connection = server.connection()
    exchanged(connection, request())

    def waits(message, _connected):
        if isinstance(message, frames.ComputeMessage):
            gate.wait(5)

    server.before, connection.timeout_s = waits, 0.3
    with pytest.raises(RequestTimeoutError):
        exchanged(connection, request())
    gate.set()
    wait_for(lambda: server.counts["ended"] == 1)
    assert server.counts["FreeSegmentMessage"] == 0
    connection.timeout_s = 5.0
    server.before = lambda message, connected: None
    assert exchanged(connection, request()).status == 200
    assert server.counts["accepted"] == 2
    connection.close()


@pytest.mark.parametrize("kind", [frames.HelloMessage, frames.GrowArenaMessage, frames.ComputeMessage])
def test_a_refusal_is_the_answer(server, connection, kind):
    problem = {"code": "overloaded", "status": 429}
    server.before = lambda message, _: (
        frames.LocalResponse(429, problem=problem) if isinstance(message, kind) else None
    )
    answer = exchanged(connection, request())
    assert (answer.status, json.loads(bytes(answer.body))) == (429, problem)
    server.before = lambda message, connected: None
    assert exchanged(connection, request()).status == 200


def test_a_server_that_says_why_it_takes_no_connection_is_heard(server, connection):
    def refuses(_message, connected):
        connected.sendall(frames.encode_frame(0, frames.LocalResponse(403, problem={"code": "forbidden"})))
        connected.shutdown(socket.SHUT_RDWR)

    server.before = refuses
    answer = exchanged(connection, request())
    assert (answer.status, json.loads(bytes(answer.body))) == (403, {"code": "forbidden"})


def test_a_key_is_given(server):
    said = []
    server.before = lambda message, _: said.append(message)
    connection = server.connection(api_key="secret")
    exchanged(connection, request())
    assert said[0] == frames.HelloMessage(frames.VERSION, "secret")
    connection.close()


def test_a_connection_that_ended_while_nobody_asked_is_opened_again(server, connection):
    ends = []
    server.before = lambda message, connected: ends.append(connected)
    exchanged(connection, request())
    ends[0].shutdown(socket.SHUT_RDWR)
    assert exchanged(connection, request()).status == 200
    assert server.counts["accepted"] == 2


def test_a_connection_that_ends_within_a_request_is_a_failure(server, connection):
    def ends(message, connected):
        if isinstance(message, frames.ComputeMessage):
            connected.shutdown(socket.SHUT_RDWR)

    server.before = ends
    with pytest.raises(ConnectionFailedError):
        exchanged(connection, request())


def test_what_is_no_answer_is_said(server, connection):
    server.before = lambda _message, connected: connected.sendall(frames.PREFIX.pack(2, 1) + b"no")
    with pytest.raises(UnexpectedAnswerError):
        exchanged(connection, request())


def test_nobody_there_is_a_failure(tmp_path):
    connection = LocalLoadConnection(str(tmp_path / "none"), None, 1.0)
    with pytest.raises(ConnectionFailedError):
        exchanged(connection, request())


def test_one_thread_drives_many_and_checks_every_answer(server):
    address = ServerAddress.parse_url(f"unix://{server.path}")
    pool = [request(rows, rows) for rows in (1, 2, 3, 40)]
    sender = RequestSender(
        address, pool, ResponseChecker(NativeAdapter(), pool), check_share=1.0, seed=0, timeout_s=5.0
    )
    assert [record.code for record in sender.send_and_check_each_once()] == ["ok"] * 4
    start = time.perf_counter()
    arrivals = ClosedLoopSchedule(
        LoadPhase("a", "closed", 0.2, connections=6), start, ArrivalGenerator((0, 1), [1.0] * 4)
    )
    sender.send_segment(arrivals, 6, [start], lambda: None)
    records = [record for _, record in sender.take_records()]
    assert len(records) > 6
    assert server.counts["accepted"] == 6
    assert {(record.code, record.checked, record.fault) for record in records} == {("ok", True, None)}
    sender.close()
