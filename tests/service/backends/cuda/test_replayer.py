"""The extension that answers recurring requests, on a driver that does what a test says."""

import socket
import threading
import time

import pytest
from normserve.backends.cuda.replayer import build
from normserve.backends.replay_interface import FAILED, RECEIVED, UNSENT
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader

from tests.service.backends.cuda.replayer_client import CONTENT, client, frame

__all__ = ["client"]


def test_a_known_request_is_launched_and_answered(client):
    client.send(CONTENT, tag=2**32 - 5)
    before = time.perf_counter()
    assert client.serve() == []
    assert client.driver.launched == [7]
    [(tag, answer)] = client.answers(1)
    assert tag == 2**32 - 5
    assert (answer.status, answer.batch_size) == (200, 1)
    assert answer.results == {"y": frames.TensorReference(0, 16, "float32", (2, 4))}
    assert answer.stages_ms["kernel"] == 0.25
    assert set(answer.stages_ms) == {"recv", "queue", "copy_in", "kernel", "copy_out"}
    assert (answer.kernel_bytes, answer.kernel_bandwidth) == (5000, 5000 / 0.25e-3)
    [(held, [sample])] = client.replayer.take_samples()
    assert held is client.retained
    received, launched, *stages, answering, ended = sample
    assert before < received < launched < answering < ended < time.perf_counter()
    assert stages == [0, 0.25e-3, 0]
    assert client.replayer.take_samples() == []


def test_each_answer_has_a_name_of_its_own(client):
    client.send(*[CONTENT] * 20)
    client.serve()
    names = {answer.request_id for _, answer in client.answers(20)}
    assert len(names) == 20
    assert {len(name) for name in names} == {32}


def test_what_is_not_known_goes_to_the_caller_as_it_came(client):
    client.send(CONTENT, b"{}", CONTENT)
    assert client.serve() == [(RECEIVED, client.descriptor, 0, 0, frame(2, b"{}") + frame(3, CONTENT))]
    assert [tag for tag, _ in client.answers(1)] == [1]
    assert client.driver.launched == [7]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 8 + len(CONTENT) - 1])
def test_a_frame_that_is_not_whole_goes_to_the_caller_and_so_does_its_rest(client, length):
    whole = frame(1, CONTENT)
    client.theirs.sendall(whole[:length])
    assert client.serve() == [(RECEIVED, client.descriptor, 0, 0, whole[:length])]
    client.replayer.set_caller_state(client.descriptor, True, False)
    client.theirs.sendall(whole[length:] + whole)
    assert client.serve() == [(RECEIVED, client.descriptor, 0, 0, whole[length:] + whole)]
    client.replayer.set_caller_state(client.descriptor, False, False)
    client.theirs.sendall(whole)
    assert client.serve() == []
    assert client.driver.launched == [7]


@pytest.mark.parametrize("length", [0, 2**16, 2**31, 2**32 - 1])
def test_a_length_that_cannot_be_is_for_the_caller(client, length):
    said = frames.PREFIX.pack(length, 1) + CONTENT
    client.theirs.sendall(said)
    assert client.serve() == [(RECEIVED, client.descriptor, 0, 0, said)]
    assert client.driver.launched == []


@pytest.mark.parametrize("limits", [{"requests": 0}, {"nbytes": 99}, {"may_launch": False}])
def test_nothing_is_launched_beyond_what_may_be(client, limits):
    client.send(CONTENT)
    assert client.serve(**limits) == [(RECEIVED, client.descriptor, 0, 0, frame(1, CONTENT))]
    assert client.driver.launched == []


def test_the_limits_are_of_a_whole_turn(client):
    client.send(*[CONTENT] * 5)
    [(kind, _, _, _, rest)] = client.serve(requests=3)
    assert (kind, rest) == (RECEIVED, frame(4, CONTENT) + frame(5, CONTENT))
    client.send(*[CONTENT] * 5)
    [(_, _, _, _, rest)] = client.serve(nbytes=250)
    assert rest == b"".join(frame(tag, CONTENT) for tag in (3, 4, 5))


def test_a_launch_that_has_not_ended_is_answered_in_a_later_turn(client):
    client.driver.ends_at_once = False
    client.send(CONTENT, CONTENT)
    assert client.serve(max_s=0.01) == []
    assert client.replayer.count_all() == (2, 200, 0)
    assert client.replayer.count_launches(client.descriptor) == 2
    assert not client.has_answer()
    client.driver.end()
    assert client.serve(max_s=0.01) == []
    assert client.replayer.count_all() == (1, 100, 1)
    assert [tag for tag, _ in client.answers(1)] == [1]
    client.driver.end()
    client.serve(max_s=0.01)
    assert client.replayer.count_all() == (0, 0, 2)
    assert [tag for tag, _ in client.answers(1)] == [2]
    # Those of the first two are used again.
    client.driver.ends_at_once = True
    client.send(CONTENT)
    client.serve()
    assert client.driver.events == 4


def test_more_launches_than_are_watched_are_for_the_caller(client):
    client.driver.ends_at_once = False
    client.send(*[CONTENT] * 40)
    [(kind, _, _, _, rest)] = client.serve()
    assert (kind, rest[:8]) == (RECEIVED, frames.PREFIX.pack(len(CONTENT), 33))
    assert client.replayer.count_all() == (32, 3200, 0)
    client.driver.end(32)
    client.serve()
    assert [tag for tag, _ in client.answers(32)] == [*range(1, 33)]


def test_launches_of_one_stream_do_not_wait_for_those_of_another(client):
    client.learn(b"slow", 9, stream=3)
    client.driver.slow.add(3)
    client.send(b"slow", CONTENT, b"slow", CONTENT)
    client.serve(max_s=0.01)
    assert [tag for tag, _ in client.answers(2)] == [2, 4]
    assert client.replayer.count_all() == (2, 200, 2)
    client.driver.slow.clear()
    client.serve(max_s=0.01)
    assert [tag for tag, _ in client.answers(2)] == [1, 3]


def test_a_launch_in_parts_is_measured_by_its_marks(client):
    """Two parts: copied in by 1 and 3 ms, computed by 2 and 7 ms; a whole of 10 ms."""
    client.learn(b"parts", 9, part_events=[(101, 102), (103, 104)])
    client.driver.elapsed_ms = {101: 1.0, 102: 2.0, 103: 3.0, 104: 7.0} | dict.fromkeys((1, 2), 10.0)
    client.send(b"parts")
    assert client.serve() == []
    [(_, answer)] = client.answers(1)
    assert answer.stages_ms | {"queue": 0} == pytest.approx(
        {"recv": 0, "queue": 0, "copy_in": 3, "kernel": 1 + 4, "copy_out": 2}
    )
    [(_, [sample])] = client.replayer.take_samples()
    assert sample[2:5] == pytest.approx((3e-3, 5e-3, 2e-3))


@pytest.mark.parametrize("part_events", [7, [7], [(1,)], [(1, 2, 3)], [(1, "2")]])
def test_part_events_that_are_no_pairs_of_handles_are_refused(client, part_events):
    with pytest.raises(TypeError):
        client.learn(b"parts", part_events=part_events)
    client.send(b"parts")
    [(kind, *_)] = client.serve()
    assert kind == RECEIVED


def test_answers_follow_those_that_the_caller_has_not_sent(client):
    client.replayer.set_caller_state(client.descriptor, False, True)
    client.send(CONTENT)
    [(kind, descriptor, _, _, whole)] = client.serve()
    assert (kind, descriptor) == (UNSENT, client.descriptor)
    assert not client.has_answer()
    assert frames.decode_response(whole[8:]).status == 200


def test_the_rest_of_an_answer_that_is_not_read_goes_to_the_caller(client):
    client.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.learn(b"long", 9, b'{"y":"' + b"x" * 2**20 + b'"}')
    client.send(b"long", CONTENT)
    sent, last = client.serve()
    assert [sent[0], last[0]] == [UNSENT, UNSENT]
    got = b""
    while len(got) + len(sent[4]) < 2**20 or client.has_answer():
        got += client.theirs.recv(2**16)
    whole = got + sent[4] + last[4]
    [(first, _), (second, answer)] = FrameReader(2**21).feed(whole)
    assert (first, second, answer[:13]) == (1, 2, b'{"status":200')


@pytest.mark.parametrize("function", ["event_create", "graph_launch"])
def test_what_cannot_be_launched_is_for_the_caller(client, function):
    client.driver.codes[function] = 2
    client.send(CONTENT)
    assert client.serve() == [(RECEIVED, client.descriptor, 0, 0, frame(1, CONTENT))]
    assert client.replayer.count_all() == (0, 0, 0)
    client.driver.codes.clear()
    client.send(CONTENT)
    assert client.serve() == []


@pytest.mark.parametrize("function", ["event_query", "event_elapsed"])
def test_a_launch_that_fails_is_reported_with_its_code(client, function):
    client.driver.codes[function] = 700
    client.send(CONTENT)
    [(kind, descriptor, tag, code, held)] = client.serve()
    assert (kind, descriptor, tag, code) == (FAILED, client.descriptor, 1, 700)
    assert held is client.retained
    assert not client.has_answer()
    assert client.replayer.count_all() == (0, 0, 0)


def test_a_connection_that_is_not_read_keeps_its_frames(client):
    client.replayer.set_receiving(client.descriptor, False)
    client.replayer.set_receiving(client.descriptor, False)
    client.send(CONTENT)
    assert client.serve() == []
    assert client.driver.launched == []
    client.replayer.set_receiving(client.descriptor, True)
    client.serve()
    assert client.driver.launched == [7]


def test_a_request_that_follows_an_answer_closely_is_waited_for(client):
    client.send(CONTENT)
    client.serve(poll_s=20.0)
    client.answers(1)
    # The first came at any time, the second soon after the first answer: a third may, too.
    client.send(CONTENT)
    thread = threading.Thread(target=lambda: (client.answers(1), client.send(CONTENT)))
    thread.start()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client.driver.on_launch = lambda graph: len(client.driver.launched) == 3 and theirs.send(b"x")
        assert client.serve(poll_s=20.0, other_descriptor=ours.fileno(), max_s=20.0) == []
    thread.join()
    assert client.driver.launched == [7, 7, 7]


def test_other_work_ends_a_wait(client):
    client.driver.ends_at_once = False
    client.send(CONTENT)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        began = time.perf_counter()
        assert client.serve(other_descriptor=ours.fileno(), max_s=20.0) == []
        assert time.perf_counter() - began < 10


def test_other_threads_run_while_it_serves_and_may_not_use_it(client):
    client.driver.ends_at_once = False
    client.send(CONTENT)
    refused = []

    def use():
        while not client.driver.launched:
            time.sleep(0.001)
        try:
            client.replayer.take_samples()
        except RuntimeError as error:
            refused.append(error)
        client.driver.end()

    thread = threading.Thread(target=use)
    thread.start()
    assert client.serve(max_s=20.0) == []
    thread.join()
    assert len(refused) == 1
    assert client.replayer.count_all()[2] == 1


def test_a_source_that_does_not_compile_leaves_requests_to_python(monkeypatch, caplog):
    monkeypatch.setattr(build, "make_gcc_command", lambda target: ["sh", "-c", "echo broken >&2; exit 1"])
    assert build.load_extension() is None
    assert "broken" in caplog.text
