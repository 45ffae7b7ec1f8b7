"""What happens when the server starts and stops, and when its device fails."""

import json
import os
import signal
import time
from concurrent.futures import Future

import httpx
import pytest

from tests.integration.harness.misbehaving_server import FAILS
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.servers import find_free_port, is_up, of_one_process
from tests.integration.harness.stage import SCRIPT
from tests.integration.harness.wire import X, assert_alive, assert_problem, npy


def test_sigterm_finishes_what_was_admitted_and_refuses_the_rest(stage_of):
    stage = stage_of()
    running, queued = stage.occupy_device(), stage.post_later(8)
    stage.wait_for_queue(1)
    stage.server.terminate()
    stage.until(lambda: "draining" in stage.server.log)
    assert_problem(stage.http.get("/readyz"), 503, "draining")
    assert stage.http.get("/livez").status_code == 200
    refused = stage.post(8)
    assert_problem(refused, 503, "draining")
    assert refused.headers["connection"] == "close"
    assert "retry-after" in refused.headers
    stage.open_gate()
    assert running.result().status_code == queued.result().status_code == 200
    assert stage.server.wait() == 0


def test_what_is_not_finished_in_the_grace_time_is_told_so(stage_of):
    stage = stage_of("--drain-s", "0.5")
    running, queued = stage.occupy_device(), stage.post_later(8)
    stage.wait_for_queue(1)
    stage.server.terminate()
    for refused in (running, queued):
        assert_problem(refused.result(), 503, "draining")
        assert refused.result().headers["connection"] == "close"
    assert stage.server.wait() == 0


@pytest.mark.parametrize("framing", ["Content-Length: 200", "Transfer-Encoding: chunked"])
def test_whoever_has_not_sent_its_body_in_the_grace_time_is_told_so(start_server, framing):
    server = start_server("--drain-s", "0.2")
    with Connection(server.address) as late:
        late.sendall(head("/v1/layer_norm", framing, "Expect: 100-continue"))
        # It is admitted: the server waits for the body.
        assert late.answer().status_code == 100
        server.terminate()
        refused = late.answer()
        assert_problem(refused, 503, "draining")
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        assert late.everything() == b""
    assert server.wait() == 0
    assert "Traceback" not in server.log


def test_a_body_that_arrives_in_the_grace_time_is_computed(start_server, until):
    server = start_server()
    body = npy(X)
    with Connection(server.address) as late:
        late.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}", "Expect: 100-continue"))
        assert late.answer().status_code == 100
        server.terminate()
        until(lambda: "draining" in server.log)
        late.sendall(body)
        assert late.answer().status_code == 200
    assert server.wait() == 0


def test_sigterm_of_an_idle_server(start_server):
    server = start_server()
    with Connection(server.address) as idle:
        server.terminate()
        assert server.wait() == 0
        assert idle.everything() == b""
    assert "SIGTERM came" in server.log


@pytest.mark.parametrize("devices", [[], ["--devices", "cpu,cpu"], ["--frontends", "1"]])
def test_sighup_without_tls_ends_nothing(start_server, until, devices):
    server = start_server(*devices)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: "SIGHUP came and is ignored" in server.log)
    with server.client() as http:
        assert_alive(http)
    assert server.log.count("SIGHUP") == 1
    server.terminate()
    # To the end of the process, which outlasts its event loop.
    while server.process.poll() is None:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.001)
    assert server.wait() == 0


def answered_well(running: "Future[httpx.Response]") -> bool:
    try:
        return running.result().status_code == 200
    except httpx.TransportError:
        return False


def test_second_signal_stops_at_once(stage_of):
    stage = stage_of()
    running = stage.occupy_device()
    stage.server.terminate()
    stage.until(lambda: "draining" in stage.server.log)
    stage.server.terminate()
    assert stage.server.wait() == 1
    assert not answered_well(running)


@of_one_process
def test_device_failure_ends_the_process(stage_of):
    stage = stage_of("--log-format", "json")
    running, doomed = stage.occupy_device(), stage.post_later(FAILS)
    stage.wait_for_queue(1)
    behind = stage.post_later(FAILS, rows=2, dropout=0.5, seed=1)
    stage.wait_for_queue(2)
    stage.open_gate()
    assert running.result().status_code == 200
    assert_problem(doomed.result(), 500, "device_failure")
    # What the device was not given cannot have been the cause, and may be sent again.
    assert_problem(behind.result(), 503, "not_ready")
    assert "retry-after" in behind.result().headers
    assert stage.server.wait() == 1
    logged = [json.loads(line) for line in stage.server.lines if line.startswith("{")]
    # Who is asked about an answer finds it in the log.
    failed = {each["request_id"] for each in logged if each["logger"] == "normserve.failures"}
    assert failed == {doomed.result().headers["x-request-id"]}
    (report,) = [each for each in logged if each["logger"] == "normserve.crash"]
    assert report["level"] == "CRITICAL"
    assert (report["what"], report["settings"]["backend"]) == ("the device failed", "torch")
    assert "float32[1, 102]" in report["work"]
    assert report["traceback"].endswith("DeviceFailureError: injected\n")


@of_one_process
def test_whoever_has_not_sent_its_body_when_the_device_fails_is_told_so(stage_of):
    stage = stage_of()
    with Connection(stage.server.address) as late:
        late.sendall(head("/v1/layer_norm", "Content-Length: 200", "Expect: 100-continue"))
        assert late.answer().status_code == 100
        assert_problem(stage.post(FAILS), 500, "device_failure")
        refused = late.answer()
        assert_problem(refused, 503, "not_ready")
        assert "retry-after" in refused.headers
    assert stage.server.wait() == 1


@of_one_process
def test_a_crash_report_can_be_copied_from_text(stage_of):
    stage = stage_of()
    assert_problem(stage.post(FAILS), 500, "device_failure")
    assert stage.server.wait() == 1
    assert stage.server.log.count("CRITICAL normserve.crash: crash report\n    what: the device failed\n") == 1


def test_a_fatal_signal_says_where_each_thread_was(start_server, until):
    server = start_server()
    os.kill(server.owner, signal.SIGSEGV)
    until(lambda: "Fatal Python error: Segmentation fault" in server.log and "executor.py" in server.log)


def test_not_ready_before_the_device_is(start_server, tmp_path, until):
    gate = tmp_path / "gate"
    port = find_free_port()
    options = ("--port", str(port))
    server = start_server(*options, env={"GATE": str(gate), "WAIT_AT_START": "1"}, script=SCRIPT, wait=False)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as http:
        until(lambda: is_up(http))
        assert_problem(http.get("/readyz"), 503, "not_ready")
        refused = http.post("/v1/layer_norm", content=npy(X))
        assert_problem(refused, 503, "not_ready")
        assert "retry-after" in refused.headers
        assert http.get("/v1/info").json()["state"] == "starting"
        assert http.get("/").status_code == 200
        gate.touch()
        server.wait_until_ready()
        assert http.get("/readyz").status_code == 200
        assert_alive(http)
