"""Registered shared memory: spans that lie, and what changes while it is used."""

import functools
import os
import threading

import numpy as np
import pytest

from tests.integration.harness.misbehaving_server import WAITS
from tests.integration.harness.stage import stage_on
from tests.integration.harness.wire import assert_alive
from tests.security.oip.regions import (
    PREFIX,
    REFUSED,
    assert_refused,
    in_region,
    infer,
    register,
)


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
