"""Who sends, against a server that answers well, badly, or not for a while."""

import socket
import threading
import time

import pytest
from normload.adapters.native import NativeAdapter
from normload.clients.prepared_requests import prepare_request
from normload.clients.request_sender import RequestSender
from normload.clients.response_checker import ResponseChecker
from normload.load.scenarios import LoadPhase
from normload.load.schedules import ArrivalGenerator, ClosedLoopSchedule, OpenLoopSchedule
from normload.measurements.tallies import PhaseTally
from normserve.client.http.server_address import ServerAddress

from tests.loadtest.conftest import WORKLOAD


def sender_of(server, timeout_s):
    address = ServerAddress.parse_url(server.url)
    pool = [prepare_request(case, NativeAdapter(), address, None) for case, _ in WORKLOAD.draw_cases(0)]
    return RequestSender(
        address, pool, ResponseChecker(NativeAdapter(), pool), check_share=0.0, seed=0, timeout_s=timeout_s
    )


@pytest.fixture
def sender(fake_server):
    made = sender_of(fake_server, timeout_s=5.0)
    # The server computes its answers at their first request.
    made.send_and_check_each_once()
    yield made
    made.close()


def draws():
    return ArrivalGenerator((0, 1), [1.0] * WORKLOAD.pool)


def played(sender, phase, connections, grace_s=5.0):
    start = time.perf_counter()
    if phase.arrivals == "closed":
        arrivals = ClosedLoopSchedule(phase, start, draws())
    else:
        arrivals = OpenLoopSchedule([phase], start, grace_s, draws())
    sender.send_segment(arrivals, connections, [start], lambda: None)
    return [record for _, record in sender.take_records()]


def stalls_once(server, at, seconds):
    def before(number):
        if number == at:
            time.sleep(seconds)

    server.requests, server.before = 0, before


def test_a_response_after_the_timeout_is_none(fake_server, sender):
    fake_server.before = lambda _: time.sleep(0.02)
    sender._timeout_s = 0.01
    records = played(sender, LoadPhase("a", "constant", 0.1, rate=30.0), connections=1)
    assert {(record.code, record.status) for record in records} == {("timeout", 0)}
    sender._timeout_s = 5.0
    (record,) = played(sender, LoadPhase("a", "constant", 0.01, rate=100.0), connections=1)
    assert record.code == "ok"


def test_a_stall_shows_in_every_request_that_was_due_during_it(fake_server, sender):
    stalls_once(fake_server, 10, 0.5)
    records = played(sender, LoadPhase("a", "constant", 1.0, rate=100.0), connections=1)
    assert len(records) == 100
    tally = PhaseTally(1.0)
    tally.add_records(records)
    latencies = [record.ended_s - record.due_s for record in records]
    # 50 requests were due while the server stood, and each waited for the rest of it.
    assert sum(latency_s > 0.1 for latency_s in latencies) >= 35
    assert tally.sum_all().latency.compute_percentile_s(75) > 0.1
    # From when they were sent, one alone took long: what a closed loop would have seen.
    assert sum(record.ended_s - record.sent_s > 0.25 for record in records) <= 3
    # The client itself was not late: nobody was free.
    assert tally.lag.compute_percentile_s(75) < tally.sum_all().latency.compute_percentile_s(75) / 2


def test_a_closed_loop_asks_a_stalled_server_less(fake_server, sender):
    stalls_once(fake_server, 3, 0.4)
    records = played(sender, LoadPhase("a", "closed", 0.4, connections=1), connections=1)
    assert len(records) == 3


def test_connections_are_used_at_once(fake_server, sender):
    together, were_together = threading.Barrier(4), threading.Event()

    def wait_for_others(_):
        # Each of the first four answers waits until four requests are here.
        if not were_together.is_set():
            together.wait(4)
            were_together.set()

    fake_server.before = wait_for_others
    played(sender, LoadPhase("a", "closed", 0.3, connections=4), connections=4)
    assert were_together.is_set()


def test_what_was_due_too_long_ago_is_not_sent_but_counted(fake_server, sender):
    fake_server.requests, fake_server.before = 0, lambda _: time.sleep(0.1)
    records = played(sender, LoadPhase("a", "constant", 0.5, rate=50.0), connections=1, grace_s=0.1)
    sent = [record for record in records if record.code != "not_sent"]
    assert len(records) == 25
    assert len(sent) == fake_server.requests < 10
    assert all(record.status == 0 for record in records if record.code == "not_sent")


def test_errors_have_their_code_and_their_status(fake_server, sender):
    failures = {1: (429, "overloaded"), 2: (503, "draining"), 3: (502, ""), 4: (429, "overloaded")}
    fake_server.requests, fake_server.before = 0, failures.get
    records = played(sender, LoadPhase("a", "constant", 0.3, rate=50.0), connections=1)
    tally = PhaseTally(0.3)
    tally.add_records(records)
    assert tally.sum_all().outcomes == {
        (429, "overloaded"): 2,
        (503, "draining"): 1,
        (502, "502"): 1,
        (200, "ok"): 11,
    }


def test_headers_that_mean_nothing_are_no_times(fake_server, sender):
    fake_server.headers = {
        "Server-Timing": "kernel;dur=nan, x;dur=soon",
        "X-Kernel-Bytes": "9" * 400,
        "X-Batch-Size": "0",
    }
    (record,) = played(sender, LoadPhase("a", "constant", 0.01, rate=100.0), connections=1)
    assert (record.code, record.kernel_bytes, record.kernel_s) == ("ok", 0, 0.0)


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (b"", 0, "connection_failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", 0, "connection_failed"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", 0, "unexpected_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3000000000\r\n\r\n", 0, "unexpected_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", 0, "unexpected_answer"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", 302, "302"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 3000000000\r\n\r\n", 503, "503"),
    ],
    ids=["closes", "closes-within", "no-http", "endless", "compressed", "redirects", "endless-error"],
)
def test_what_a_server_does_instead_of_answering_has_a_code(raw_server, said, status, code):
    asked = sender_of(raw_server([said]), timeout_s=5.0)
    record, *_ = asked.send_and_check_each_once()
    assert (record.status, record.code, record.fault) == (status, code, None)
    asked.close()


def test_a_wrong_answer_is_a_fault(raw_server):
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/x-safetensors\r\n\r\n{}"
    asked = sender_of(raw_server([said]), timeout_s=5.0)
    record, *_ = asked.send_and_check_each_once()
    assert (record.code, record.checked) == ("ok", True)
    assert "not well-formed safetensors" in record.fault
    asked.close()


def test_a_server_that_never_answers_is_not_asked_everything_first(raw_server):
    server = raw_server([lambda connected: server.silence(connected)])
    impatient = sender_of(server, timeout_s=0.05)
    assert [record.code for record in impatient.send_and_check_each_once()] == ["timeout"] * 3
    impatient.close()


def test_a_server_that_is_gone_is_not_asked_as_fast_as_can_be(fake_server, sender):
    fake_server.shutdown()
    fake_server.server_close()
    sender._connections[0].close()
    records = played(sender, LoadPhase("a", "closed", 0.3, connections=1), connections=1)
    assert 0 < len(records) < 30
    assert {record.code for record in records} == {"connection_failed"}


def test_a_run_goes_on_while_the_server_restarts(fake_server, sender):
    fake_server.shutdown()
    fake_server.server_close()
    sender._connections[0].close()
    restarted = threading.Thread(target=fake_server.serve_forever, args=(0.01,))

    def restart():
        if restarted.ident is None:
            fake_server.socket = socket.create_server(fake_server.server_address, backlog=128)
            restarted.start()

    start = time.perf_counter()
    arrivals = ClosedLoopSchedule(LoadPhase("a", "closed", 1.0, connections=2), start, draws())
    sender.send_segment(arrivals, 2, [start], restart)
    fake_server.shutdown()
    restarted.join()
    codes = [record.code for _, record in sender.take_records()]
    assert set(codes) == {"connection_failed", "ok"}
    assert codes == sorted(codes), "once it is back no connection fails"


def test_what_the_server_says_of_its_device_is_kept(sender):
    (record,) = played(sender, LoadPhase("a", "constant", 0.01, rate=100.0), connections=1)
    # A launch of two requests took 2 ms.
    assert (record.kernel_bytes, record.kernel_s) == (1000, pytest.approx(0.001))
    assert record.sent_bytes > 0
    assert record.received_bytes > 0
    assert not record.checked


def test_an_error_of_the_harness_is_not_swallowed(sender, monkeypatch):
    monkeypatch.setattr(ResponseChecker, "find_fault", lambda *_: 1 / 0)
    monkeypatch.setattr(sender, "_check_share", 1.0)
    with pytest.raises(ZeroDivisionError):
        played(sender, LoadPhase("a", "closed", 5.0, connections=1), connections=1)
