"""A connection of the blocking client to servers that answer what they like, or not at all."""

import os
import signal
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

import msgspec
import pytest
from normserve.client import Client, ConnectionFailedError, RequestTimeoutError, RetryPolicy, UnexpectedAnswerError
from normserve.client.deadlines import Deadline
from normserve.client.local import connection
from normserve.client.local.client_protocol import LocalRequest
from normserve.client.local.connection import LocalClientConnection
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader
from normserve.memory.host_segments import HostSegment, make_segment

LONG = {str(number): frames.TensorReference(0, 0, "x" * 200, (1,)) for number in range(200)}


@contextmanager
def serving(path, answer, connections=1):
    """A server, of one connection after another; `answer(connection, tag, message)` is told of all but hellos.

    It returns whether the connection ends.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    accepted = []

    def converse(connected):
        found = FrameReader(2**30)
        while data := connected.recv(2**16):
            for tag, content in found.feed(data):
                (message,) = frames.decode_messages(content)
                if isinstance(message, frames.HelloMessage):
                    connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, document={})))
                elif answer(connected, tag, message):
                    return

    def serve():
        # A client that was out of time may not have connected; then the listener's end ends the wait.
        with suppress(OSError):
            for _ in range(connections):
                connected, _ = listener.accept()
                accepted.append(connected)
                with connected, suppress(OSError):
                    converse(connected)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Wakes the thread, which a client that failed would leave waiting.
        for connected in (listener, *accepted):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


def send_segment(connected, tag):
    """What answers a request for memory."""
    descriptor, _ = make_segment(2**22, HostSegment)
    rights = struct.pack("i", descriptor)
    frame = frames.encode_frame(tag, frames.LocalResponse(200, segment=0))
    try:
        connected.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        # The client may have left.
        os.close(descriptor)


def test_a_segment_whose_number_came_before_is_no_answer(tmp_path):
    # Its places would be those of another, which somebody has.
    def answer(connected, tag, message):
        send_segment(connected, tag)

    path = str(tmp_path / "socket")
    with serving(path, answer), Client(f"unix://{path}", retries=RetryPolicy(tries=1)) as client:
        x = client.empty((2**20,))
        x[:] = 1
        with pytest.raises(UnexpectedAnswerError, match="number"):
            client.empty((2**20,))
        assert x.sum() == 2**20


def test_what_follows_a_frame_that_was_cut_is_not_sent(tmp_path):
    heard = threading.Event()
    over = threading.Event()

    def answer(connected, tag, message):
        heard.set()
        over.wait(20)
        return True

    path = str(tmp_path / "socket")
    with serving(path, answer):
        link = LocalClientConnection(path, None, Deadline(20))
        try:
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 10_000))
            threading.Thread(target=lambda: ask(link, frames.GetInfoMessage(), 0.5)).start()
            heard.wait(20)
            message = msgspec.Raw(msgspec.json.encode(frames.ComputeMessage("layer_norm", LONG, {})))
            with pytest.raises(RequestTimeoutError):
                link.send_and_wait(LocalRequest(message), Deadline(0.1))
            # Nobody knows where a next frame would begin.
            assert not link.is_usable
        finally:
            over.set()
            link._socket.close()


class StopError(Exception):
    """Raised by the test."""


def test_an_answer_is_taken_back_when_what_is_done_meanwhile_raises(tmp_path):
    heard = []

    def answer(connected, tag, message):
        heard.append((tag, message))
        if isinstance(message, frames.CancelRequestMessage):
            connected.sendall(frames.encode_frame(message.request, frames.LocalResponse(409)))
        elif isinstance(message, frames.ListLayersMessage):
            connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, document="layers")))

    def stop():
        raise StopError

    path = str(tmp_path / "socket")
    with serving(path, answer):
        link = LocalClientConnection(path, None, Deadline(20))
        try:
            with pytest.raises(StopError):
                link.send_and_wait(LocalRequest(frames.GetInfoMessage(), on_sent=stop), Deadline(20))
            assert link.send_and_wait(LocalRequest(frames.ListLayersMessage()), Deadline(20)).document == "layers"
            assert [message for _, message in heard[:2]] == [
                frames.GetInfoMessage(),
                frames.CancelRequestMessage(heard[0][0]),
            ]
            assert not link.protocol.has_pending
        finally:
            link._socket.close()


def test_malformed_results_are_no_answer(tmp_path):
    def answer(connected, tag, message):
        if isinstance(message, frames.GrowArenaMessage):
            send_segment(connected, tag)
        else:
            connected.sendall(frames.encode_frame(tag, msgspec.Raw(b'{"status":200,"results":{"y":{}}}')))

    path = str(tmp_path / "socket")
    with serving(path, answer), Client(f"unix://{path}", retries=RetryPolicy(tries=1)) as client:
        x = client.empty((4, 4))
        with pytest.raises(UnexpectedAnswerError, match="malformed"):
            client.layer_norm(x)
        del x


@pytest.mark.parametrize(
    "flood", [frames.encode_frame(2**31, frames.LocalResponse(200)), bytes(1)], ids=["answers", "bytes"]
)
def test_a_server_that_sends_other_things_does_not_hold_a_call_past_its_timeout(tmp_path, monkeypatch, flood):
    # What comes at once is polled for, and never waited for.
    monkeypatch.setattr(connection, "_MAY_POLL", True)
    monkeypatch.setattr(connection, "_SOON_S", 20.0)
    monkeypatch.setattr(connection, "_POLLED_S", 20.0)

    def answer(connected, tag, message):
        if isinstance(message, frames.GetInfoMessage):
            connected.sendall(frames.PREFIX.pack(2**20, tag)) if len(flood) == 1 else None
            while True:
                connected.sendall(flood)

    path = str(tmp_path / "socket")
    with serving(path, answer):
        link = LocalClientConnection(path, None, Deadline(20))
        try:
            with pytest.raises(RequestTimeoutError):
                link.send_and_wait(LocalRequest(frames.GetInfoMessage()), Deadline(0.1))
        finally:
            link._socket.close()


class LateError(Exception):
    """Raised by the test where a wait has no end."""


@pytest.fixture
def stops():
    """Has what still waits after seconds raise an error, whatever it waits for."""

    def stop(*_):
        raise LateError

    signal.signal(signal.SIGALRM, stop)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_thread_that_cannot_send_does_not_hold_others_past_their_timeouts(tmp_path, stops):
    over = threading.Event()

    def answer(connected, tag, message):
        over.wait(20)
        return True

    path = str(tmp_path / "socket")
    message = msgspec.Raw(msgspec.json.encode(frames.ComputeMessage("layer_norm", LONG, {})))
    with serving(path, answer):
        link = LocalClientConnection(path, None, Deadline(20))
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        threads = [threading.Thread(target=ask, args=(link, message, 20)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            while not link._send_lock.locked():
                time.sleep(0.001)
            stops(5)
            with pytest.raises(RequestTimeoutError):
                link.send_and_wait(LocalRequest(message), Deadline(0.05))
        finally:
            over.set()
            for thread in threads:
                thread.join(20)
            link._socket.close()


def test_a_request_of_which_nothing_could_be_sent_costs_no_connection(tmp_path, stops):
    reads = threading.Event()

    def answer(connected, tag, message):
        reads.wait(20)
        if not isinstance(message, frames.CancelRequestMessage):
            connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, document={})))

    path = str(tmp_path / "socket")
    with serving(path, answer):
        link = LocalClientConnection(path, None, Deadline(20))
        try:
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            stops(15)
            for _ in range(30):
                with pytest.raises(RequestTimeoutError):
                    link.send_and_wait(LocalRequest(frames.GetInfoMessage()), Deadline(0.005))
            assert link.is_usable
            reads.set()
            assert link.send_and_wait(LocalRequest(frames.GetInfoMessage()), Deadline(20)).status == 200
        finally:
            reads.set()
            link._socket.close()


def test_a_server_that_accepts_nobody_does_not_hold_a_call_past_its_timeout(tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with pytest.raises(RequestTimeoutError):
            LocalClientConnection(path, None, Deadline(0.05))


def test_an_answer_that_brings_no_memory_is_no_answer_to_a_request_for_it(tmp_path):
    asked = []

    def answer(connected, tag, message):
        asked.append(message)
        connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200)))

    path = str(tmp_path / "socket")
    with (
        serving(path, answer),
        Client(f"unix://{path}", retries=RetryPolicy(tries=1)) as client,
        pytest.raises(UnexpectedAnswerError),
    ):
        client.empty((4, 4))
    assert len(asked) == 1


def ask(link, message, timeout_s):
    try:
        link.send_and_wait(LocalRequest(message), Deadline(timeout_s))
    except (RequestTimeoutError, ConnectionFailedError):
        return
