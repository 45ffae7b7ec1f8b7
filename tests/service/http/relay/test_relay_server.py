"""The process that owns the device, as its front ends see it."""

import asyncio
import json
import socket
from dataclasses import replace

import pytest
from normserve.http.relay import relay_messages

from tests.service.http.relay.owner_scene import HEADERS, OwnerScene, _play, either_way, scene, until


def samples(owner: OwnerScene) -> dict[str, float]:
    lines = [line for line in owner.service.metrics.render().decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@either_way
async def test_an_operation_is_answered(owner):
    front_end = owner.front_end()
    front_end.request(7)
    await until(lambda: owner.executor.running)
    assert owner.service.admission_budget.request_count == 1
    owner.executor.finish()
    answer = await front_end.answer(7)
    assert (answer.status, answer.nbytes) == (200, sum(map(len, answer.body)))
    await until(lambda: owner.is_idle)
    assert [(each.op, each.status) for each in owner.records] == [("layer_norm", 200)]


@scene
async def test_what_goes_wrong_as_a_request_begins_ends_that_one_alone(owner):
    front_end = owner.front_end()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    begin, owner.relays._dispatcher.try_begin_complete_request = (
        owner.relays._dispatcher.try_begin_complete_request,
        fail,
    )
    front_end.request(1)
    answer = await front_end.answer(1)
    assert answer.status == 500
    assert json.loads(answer.data)["code"] == "internal"
    owner.relays._dispatcher.try_begin_complete_request = begin
    front_end.request(2)
    await until(lambda: owner.executor.running)
    owner.executor.finish()
    assert (await front_end.answer(2)).status == 200
    await until(lambda: owner.is_idle)
    assert [(each.status, each.error_code) for each in owner.records] == [(500, "internal"), (200, None)]


@either_way
async def test_what_goes_wrong_later_ends_the_link_and_all_that_was_on_it(owner):
    front_end, other = owner.front_end(), owner.front_end()
    loop, faults = asyncio.get_running_loop(), []
    loop.call_exception_handler = lambda context: faults.append(type(context.get("exception")))
    front_end.request(1)
    await until(lambda: owner.executor.running)
    front_end.link.send_message(relay_messages.ConnectionCount(3))
    await until(lambda: owner.relays.connection_count == 3)
    (there,) = [each for each in owner.relays._front_ends if each.hello.index == 0]
    there._requests[1].on_progress = None
    front_end.link.send_message(relay_messages.BodyProgress({1: 6}))
    await until(lambda: front_end.ended)
    assert faults == [TypeError]
    await until(lambda: owner.relays.describe_front_ends() == [{"index": 1, "pid": 1001}])
    owner.executor.finish()
    await until(lambda: owner.is_idle)
    assert [each.status for each in owner.records] == [499]
    assert owner.relays.connection_count == 0
    other.request(1)
    await until(lambda: owner.executor.running)
    owner.executor.finish()
    assert (await other.answer(1)).status == 200


@scene
async def test_a_front_end_that_has_only_been_linked_is_not_described(owner):
    here, there = socket.socketpair()
    with here:
        owner.relays.serve_front_end(there)
        front_end = owner.front_end()
        front_end.link.send_message(relay_messages.ConnectionCount(3))
        await until(lambda: owner.relays.connection_count == 3)
        assert owner.relays.describe_front_ends() == [{"index": 0, "pid": 1000}]
        assert 'frontend="-1"' not in owner.service.metrics.render().decode()
    await until(lambda: len(owner.relays._front_ends) == 1)


@scene
async def test_a_relayed_operation_has_stages_from_its_header_to_its_last_byte(owner):
    front_end = owner.front_end()
    front_end.request(1)
    await until(lambda: owner.executor.running)
    owner.executor.finish()
    await front_end.answer(1, took_s=0.002)
    await until(lambda: owner.is_idle)
    (record,) = owner.records
    stages = ("recv", "relay_in", "parse", "queue", "copy_in", "kernel", "copy_out", "resume", "serialize")
    assert set(record.stage_seconds) == {*stages, "relay_out", "send"}
    assert record.stage_seconds["send"] == 0.002
    began_at = record.response_began_at + record.stage_seconds["serialize"]
    assert began_at + record.stage_seconds["relay_out"] + 0.002 == pytest.approx(record.ended_at)
    assert record.duration_s == record.ended_at - record.began_at


@scene
async def test_what_front_ends_count_is_in_the_metrics(owner):
    one, other = owner.front_end(), owner.front_end()
    before = samples(owner)
    one.link.send_message(relay_messages.ConnectionCount(3))
    other.link.send_message(relay_messages.ConnectionCount(2))
    one.link.send_message(relay_messages.RefusalCount(431, "headers_too_large", 4))
    one.link.send_message(relay_messages.UnreadResponseCount(5))
    await until(lambda: owner.relays.connection_count == 5)
    await until(lambda: len(owner.records) == 4)
    read = samples(owner)
    assert read['normserve_errors_total{cause="headers_too_large"}'] == 4
    late = 'normserve_cancelled_total{stage="send"}'
    assert read[late] == before[late] + 5
    one.link.close()
    await until(lambda: owner.relays.connection_count == 2)
    # What it counted is counted still.
    assert samples(owner)['normserve_errors_total{cause="headers_too_large"}'] == 4


@scene
async def test_readiness_is_told_at_once_and_with_every_beat(owner):
    front_end = owner.front_end()
    await until(lambda: front_end.heard)
    assert set(map(repr, front_end.heard)) == {repr(relay_messages.OwnerReadiness(True))}
    owner.relays.report_readiness(ready=False)
    await until(lambda: relay_messages.OwnerReadiness(False) in front_end.heard)
    said = len(front_end.heard)
    await until(lambda: len(front_end.heard) > said)


@scene
async def test_a_front_end_that_reads_nothing_is_not_told_more_and_more(owner):
    front_end = owner.front_end()
    await until(lambda: front_end.heard)
    asyncio.get_running_loop().remove_reader(front_end.link._socket)
    (there,) = owner.relays._front_ends
    while not there._link.is_backlogged:
        there.send_message(relay_messages.ResponsePart(9, 200, [], bytes(2**20), more=True))
        await asyncio.sleep(0)
    unsent = len(there._link._pending_messages)
    for _ in range(100):
        owner.relays._heartbeat_timer.cancel()
        owner.relays._send_heartbeats_and_freed_slabs()
    assert len(there._link._pending_messages) <= unsent


@either_way
async def test_the_end_waits_for_what_is_under_way(owner):
    front_end = owner.front_end()
    front_end.request(1)
    await until(lambda: owner.executor.running)
    closing = asyncio.ensure_future(owner.relays.close(20))
    await asyncio.sleep(0.05)
    assert not closing.done()
    owner.executor.finish()
    assert (await front_end.answer(1)).status == 200
    await closing
    await until(lambda: front_end.ended)


def numbered(number: int, key: bytes = b"") -> tuple:
    """Headers of some 100 KB."""
    return (
        *HEADERS,
        (b"x-number", b"%d" % number),
        (b"x-long", b"x" * 100_000),
        (b"authorization", b"Bearer " + key),
    )


@pytest.fixture
def parsed(monkeypatch):
    """The numbers of the headers that have been parsed."""
    numbers = []
    read_head = relay_messages.read_head

    def read(encoded: bytes) -> relay_messages.RequestHead:
        head = read_head(encoded)
        numbers.extend(int(value) for name, value in head.headers if name == b"x-number")
        return head

    monkeypatch.setattr(relay_messages, "read_head", read)
    return numbers


async def statuses_of(front_end, numbers, head: int | None = None, key: bytes = b"", **given) -> list[int]:
    """Relay requests with numbered headers, or with the same."""
    for number in numbers:
        front_end.request(number, b"nonsense", headers=numbered(number if head is None else head, key), **given)
    return [(await front_end.answer(number)).status for number in numbers]


def test_headers_are_kept_within_their_bytes(parsed):
    @scene
    async def play(owner):
        front_end = owner.front_end()
        await statuses_of(front_end, range(80))
        assert parsed == [*range(80)]
        await statuses_of(front_end, [100], head=79)
        await statuses_of(front_end, [101], head=0)
        assert parsed[80:] == [0]

    play()


def test_an_address_with_endless_headers_evicts_nothing_of_another(parsed):
    @scene
    async def play(owner):
        front_end = owner.front_end()
        await statuses_of(front_end, [1000], client=("127.0.0.2", 1))
        await statuses_of(front_end, range(80))
        parsed.clear()
        await statuses_of(front_end, [1001], head=1000, client=("127.0.0.2", 2))
        assert parsed == []

    play()


KEY = b"k" * 40


def with_a_key(play):
    """A test of a process that asks for a key."""
    asyncio.run(_play(OwnerScene(api_key=KEY.decode()), play))


def test_headers_without_a_known_key_are_not_kept(parsed):
    @with_a_key
    async def play(owner):
        front_end = owner.front_end()
        assert await statuses_of(front_end, [1, 2], head=1, key=b"guessed") == [401, 401]
        assert parsed == [1, 1]
        assert await statuses_of(front_end, [3, 4], head=3, key=KEY) == [400, 400]
        assert parsed[2:] == [3]


def test_a_key_is_checked_for_each_request_with_the_same_header(parsed):
    @with_a_key
    async def play(owner):
        front_end = owner.front_end()
        assert await statuses_of(front_end, [1], head=1, key=KEY) == [400]
        owner.service.keyring.replace_keys([])
        assert await statuses_of(front_end, [2], head=1, key=KEY) == [401]
        assert parsed == [1]


def test_a_rate_is_checked_for_each_request_with_the_same_header(parsed):
    @with_a_key
    async def play(owner):
        front_end = owner.front_end()
        key = owner.service.keyring.find_by_token(KEY).key
        owner.service.keyring.replace_keys([replace(key, requests_per_second=1e-6)])
        assert await statuses_of(front_end, [1, 2, 3], head=1, key=KEY) == [400, 429, 429]
        assert parsed == [1]
