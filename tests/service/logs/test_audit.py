"""The audit trail tells what happened, and strangers cannot fill it."""

import asyncio
import logging

import pytest
from normserve.logs import audit
from normserve.logs.audit import KeyRefusalLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told(caplog):
    """The fields of every line so far."""
    caplog.set_level(logging.INFO, "normserve.audit")
    return lambda: [
        {"event": record.getMessage(), **record.fields}
        for record in caplog.records
        if record.name == "normserve.audit"
    ]


def test_events_have_fields_and_leave_out_what_nobody_knows(told):
    audit.log_layer_change("PUT", "/v1/layers/a", "registered", key=None, address="10.0.0.1", request_id="r")
    audit.log_end(0)
    assert told() == [
        {
            "event": "layer_change",
            "method": "PUT",
            "path": "/v1/layers/a",
            "result": "registered",
            "address": "10.0.0.1",
            "request_id": "r",
        },
        {"event": "end", "exit_code": 0},
    ]


def test_refusals_beyond_ten_a_second_are_counted(told):
    async def run() -> None:
        clock = Clock()
        refusals = KeyRefusalLog(clock)
        for _ in range(1000):
            refusals.log_refusal("unknown", "GET", "/v1/info", address="10.0.0.1")
        clock.now = 1.0
        refusals.log_refusal("absent", "GET", "/v1/info", address="10.0.0.1")

    asyncio.run(run())
    lines = told()
    assert [line["event"] for line in lines] == ["key_refused"] * 10 + ["keys_refused", "key_refused"]
    assert lines[10]["count"] == 990
    assert lines[11]["reason"] == "absent"


def test_the_count_is_told_though_nobody_comes_any_more(told, monkeypatch):
    async def run() -> None:
        loop = asyncio.get_running_loop()
        later = loop.call_later
        monkeypatch.setattr(loop, "call_later", lambda delay, *call: later(delay / 1000, *call))
        refusals = KeyRefusalLog(Clock())
        for _ in range(12):
            refusals.log_refusal("unknown", "GET", "/")
        async with asyncio.timeout(10):
            while told()[-1]["event"] != "keys_refused":
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert told()[-1]["count"] == 2


def test_a_long_path_is_cut(told):
    async def run() -> None:
        KeyRefusalLog().log_refusal("absent", "GET", "/" + "a" * 60_000)

    asyncio.run(run())
    assert len(told()[0]["path"]) == 200
