"""Whichever way a plain request goes, directly or by the application, it is answered and counted the same."""

import asyncio
import dataclasses
import functools
import hashlib
import logging
import re

import numpy as np
import pytest
import torch
from normserve.errors import DeviceOutOfMemoryError, DrainingError
from normserve.http.relay import relay_messages

from tests.integration.harness.wire import SAFETENSORS, packed
from tests.service.http.relay.owner_scene import BODY, HEADERS, OwnerScene, npy, until

WITH = dict(HEADERS)
KEY = {"api_key": "secret"}


_TIMED = b"server-timing", b"x-kernel-bandwidth"
# Of a request, that the server has made.
_NAME = re.compile(rb"\b[0-9a-f]{32}\b")


def headers(**changed: str | None):
    """The usual ones but for some; None leaves one out."""
    named = {**WITH, **{name.replace("_", "-").encode(): value for name, value in changed.items()}}
    return tuple(
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in named.items()
        if value is not None
    )


def body_of(response) -> bytes:
    return response.data if isinstance(response, relay_messages.ResponsePart) else b"".join(response.body)


def plain(answer) -> tuple:
    """What a client sees of an answer, without what is never the same."""
    named = [(name, b"" if name in _TIMED else _NAME.sub(b"...", value)) for name, value in answer.headers]
    return answer.status, sorted(named), _NAME.sub(b"...", body_of(answer))


def noted(record) -> tuple:
    """What is counted of a request, without its times."""
    stages = frozenset(record.stage_seconds)
    of_it = (
        record.op,
        record.direction,
        record.dtype,
        record.transport,
        record.status,
        record.error_code,
        record.key_name,
    )
    return *of_it, stages, record.current_stage, record.received_bytes, record.sent_bytes


def is_answered_or_runs(owner: OwnerScene, front_end, number: int) -> bool:
    return bool(front_end.said_of(number) or owner.executor.running)


async def asked(owner: OwnerScene, count: int, error, before, options):
    """The answers and records of the same request, sent so many times one after the other."""
    await owner.open()
    if before is not None:
        before(owner)
    front_end = owner.front_end()
    answers = []
    for number in range(count):
        front_end.request(number, **options)
        await until(functools.partial(is_answered_or_runs, owner, front_end, number))
        if owner.executor.running:
            owner.executor.finish(error)
        answers.append(plain(await front_end.answer(number)))
    await until(lambda: len(owner.records) == count)
    records = [noted(each) for each in owner.records]
    held = owner.is_idle
    await owner.close()
    return answers, records, held


def drain(owner: OwnerScene) -> None:
    owner.service.engine.start_draining()


def break_down(owner: OwnerScene) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("0x7f0123456789")

    owner.service.engine.submit = fail


def exhaust_memory(owner: OwnerScene) -> None:
    def allocate(nbytes: int) -> None:
        raise MemoryError(nbytes)

    slabs = owner.service.slab_pool
    slabs.source = dataclasses.replace(slabs.source, allocate=allocate)


CASES = {
    "forward": (200, {}),
    "backward": (
        200,
        {
            "path": "/v1/rms_norm/backward",
            "headers": headers(content_type=SAFETENSORS),
            "body": packed(x=torch.ones(3, 4), dy=torch.ones(3, 4)),
        },
    ),
    "group": (
        200,
        {"path": "/v1/group_norm", "query": b"num_groups=2", "body": npy(np.ones((2, 4, 3), np.float32))},
    ),
    "options": (200, {"query": b"eps=0.5&out_dtype=float16&timeout_ms=9000"}),
    "on a Unix socket": (200, {"client": None}),
    "no content type": (200, {"headers": headers(content_type=None)}),
    "accepts safetensors": (200, {"headers": headers(accept="application/vnd.safetensors")}),
    "no name of its own": (200, {"headers": headers(x_request_id="no sane name")}),
    "an origin of its own": (200, {"headers": headers(origin="http://localhost", host="localhost")}),
    "layer that there is not": (404, {"query": b"layer=nowhere"}),
    "parameter that there is not": (422, {"query": b"colour=blue"}),
    "parameter out of range": (422, {"query": b"eps=-1"}),
    "no tensor": (400, {"body": b"\x93NUMPY, or so it says"}),
    "cut off": (400, {"body": BODY[:-3]}),
    "wrong shape": (422, {"path": "/v1/group_norm", "query": b"num_groups=5"}),
    "integers": (422, {"body": npy(np.ones((3, 4), np.int32))}),
    "type that nobody knows": (415, {"headers": headers(content_type="text/plain")}),
    "encoding": (415, {"headers": headers(content_encoding="gzip")}),
    "accepts nothing": (406, {"headers": headers(accept="text/html")}),
    "bfloat16 as npy": (406, {"query": b"out_dtype=bfloat16"}),
    "late": (504, {"query": b"timeout_ms=0.0001"}),
    "another host": (421, {"headers": headers(host="elsewhere.example")}),
    "another origin": (403, {"headers": headers(origin="https://elsewhere.example")}),
}
"""By what is asked: the status of its answer."""

OTHERS = {
    "device out of memory": (503, {}, DeviceOutOfMemoryError("no memory for 12 bytes"), None, {}),
    "device draining": (503, {}, DrainingError("it ends"), None, {}),
    "draining": (503, {}, None, drain, {}),
    "unexpected": (500, {}, None, break_down, {}),
    "no memory to send from": (503, {"body": npy(np.ones((64, 1024), np.float32))}, None, exhaust_memory, {}),
    "overloaded": (
        429,
        {},
        None,
        lambda owner: owner.service.admission_budget.acquire(1),
        {"max_inflight_requests": 1},
    ),
    "too large": (413, {}, None, None, {"max_body_bytes": len(BODY) - 1}),
    "more than there may be": (429, {}, None, None, {"max_inflight_bytes": len(BODY) - 1}),
    "a key": (200, {"headers": headers(authorization="Bearer secret")}, None, None, KEY),
    "no key": (401, {}, None, None, KEY),
    "another key": (401, {"headers": headers(authorization="Bearer public")}, None, None, KEY),
    "a page of another origin that may": (
        200,
        {"headers": headers(origin="https://app.example")},
        None,
        None,
        {"cors_origins": "https://app.example"},
    ),
    "what is wrong with such a page's request": (
        400,
        {"headers": headers(origin="https://app.example"), "body": BODY[:-3]},
        None,
        None,
        {"cors_origins": "https://app.example"},
    ),
}
"""The same, with what the device says, with what is done before, and with settings."""

ALL = {**{name: (*case, None, None, {}) for name, case in CASES.items()}, **OTHERS}


@pytest.mark.parametrize("case", ALL)
def test_the_same_answer_either_way(case):
    status, options, error, before, settings = ALL[case]

    def play(*, is_direct: bool):
        # Twice: what a header says is known by then.
        return asyncio.run(asked(OwnerScene(is_direct=is_direct, **settings), 2, error, before, options))

    directly, by_application = play(is_direct=True), play(is_direct=False)
    assert directly == by_application
    answers, _, is_idle = directly
    assert [each[0] for each in answers] == [status] * 2
    assert is_idle == (case != "overloaded")


@pytest.mark.parametrize("case", ["forward", "on a Unix socket", "no tensor", "unexpected", "a key", "no key"])
def test_the_access_log_has_the_same_line_either_way(case, caplog):
    status, options, error, before, settings = ALL[case]
    caplog.set_level(logging.INFO, "normserve.access")

    def play(*, is_direct: bool):
        caplog.clear()
        owner = OwnerScene(is_direct=is_direct, access_log=True, **settings)
        asyncio.run(asked(owner, 1, error, before, options))
        (line,) = [record.fields for record in caplog.records if record.name == "normserve.access"]
        assert line.pop("ms") > 0
        return line

    directly = play(is_direct=True)
    assert directly == play(is_direct=False)
    assert (directly["status"], directly["method"]) == (status, "POST")
    assert directly["path"] == "/v1/layer_norm"


KEYS = {
    "may": ({}, [200, 200]),
    "may not": ({"may": '["layers", "metrics"]'}, [403, 403]),
    "has expired": ({"expires": "2020-01-01T00:00:00Z"}, [401, 401]),
    "has one request": ({"requests_per_second": "0.001"}, [200, 429]),
    "has as many requests as there are": ({"requests_per_second": "2"}, [200, 200]),
    "has fewer bytes than the body": ({"max_inflight_bytes": "10"}, [413, 413]),
    "has bytes enough": ({"max_inflight_bytes": "100_000"}, [200, 200]),
}
"""What a named key says, and the statuses of two requests with it."""


@pytest.mark.parametrize("case", KEYS)
def test_a_named_key_allows_the_same_either_way_and_counts_each_request_once(case, tmp_path):
    said, statuses = KEYS[case]
    digest = hashlib.sha256(b"secret").hexdigest()
    fields = {"name": '"team"', "sha256": f'"{digest}"', "may": '["infer"]'} | said
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(["[[keys]]", *(f"{name} = {value}" for name, value in fields.items())]))
    options = {"headers": headers(authorization="Bearer secret")}

    def play(*, is_direct: bool):
        owner = OwnerScene(is_direct=is_direct, api_keys_file=file)
        return asyncio.run(asked(owner, 2, None, None, options))

    directly, by_application = play(is_direct=True), play(is_direct=False)
    assert directly == by_application
    answers, records, is_idle = directly
    assert [each[0] for each in answers] == statuses
    # By name, of the key.
    assert {record[6] for record in records} == {"team"}
    assert is_idle
