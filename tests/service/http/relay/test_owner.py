"""The process that owns the device, as its front ends see it."""

import asyncio
import gc
import json

from normserve.http.relay import messages
from normserve.http.relay import owner as owner_module
from normserve.http.relay.direct import Prepared

from tests.service.http.relay.owner_scene import HEADERS, OwnerScene, either_way, scene, until


def samples(owner: OwnerScene) -> dict[str, float]:
    lines = [line for line in owner.service.metrics.render().decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@either_way
async def test_an_operation_is_answered(owner):
    front_end = owner.front_end()
    front_end.request(7)
    await until(lambda: owner.executor.running)
    assert owner.service.limits.requests == 1
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

    begin, owner.relays._direct.begin = owner.relays._direct.begin, fail
    front_end.request(1)
    answer = await front_end.answer(1)
    assert answer.status == 500
    assert json.loads(answer.data)["code"] == "internal"
    owner.relays._direct.begin = begin
    front_end.request(2)
    await until(lambda: owner.executor.running)
    owner.executor.finish()
    assert (await front_end.answer(2)).status == 200
    await until(lambda: owner.is_idle)
    assert [(each.status, each.error) for each in owner.records] == [(500, "internal"), (200, None)]


@either_way
async def test_what_goes_wrong_later_ends_the_link_and_all_that_was_on_it(owner):
    front_end, other = owner.front_end(), owner.front_end()
    loop, faults = asyncio.get_running_loop(), []
    loop.call_exception_handler = lambda context: faults.append(type(context.get("exception")))
    front_end.request(1)
    await until(lambda: owner.executor.running)
    front_end.link.send(messages.Connections(3))
    await until(lambda: owner.relays.connections == 3)
    (there,) = [each for each in owner.relays._front_ends if each.hello.index == 0]
    there._under_way[1].on_progress = None
    front_end.link.send(messages.Progress({1: 6}))
    await until(lambda: front_end.ended)
    assert faults == [TypeError]
    await until(lambda: owner.relays.described() == [{"index": 1, "pid": 1001}])
    owner.executor.finish()
    await until(lambda: owner.is_idle)
    assert [each.status for each in owner.records] == [499]
    assert owner.relays.connections == 0
    other.request(1)
    await until(lambda: owner.executor.running)
    owner.executor.finish()
    assert (await other.answer(1)).status == 200


@scene
async def test_what_front_ends_count_is_in_the_metrics(owner):
    one, other = owner.front_end(), owner.front_end()
    before = samples(owner)
    one.link.send(messages.Connections(3))
    other.link.send(messages.Connections(2))
    one.link.send(messages.Refused(431, "headers_too_large", 4))
    one.link.send(messages.LeftLate(5))
    await until(lambda: owner.relays.connections == 5)
    await until(lambda: len(owner.records) == 4)
    read = samples(owner)
    assert read['normserve_errors_total{cause="headers_too_large"}'] == 4
    late = 'normserve_cancelled_total{stage="send"}'
    assert read[late] == before[late] + 5
    one.link.close()
    await until(lambda: owner.relays.connections == 2)
    # What it counted is counted still.
    assert samples(owner)['normserve_errors_total{cause="headers_too_large"}'] == 4


@scene
async def test_readiness_is_told_at_once_and_with_every_beat(owner):
    front_end = owner.front_end()
    await until(lambda: front_end.heard)
    assert set(map(repr, front_end.heard)) == {repr(messages.Readiness(True))}
    owner.relays.report(ready=False)
    await until(lambda: messages.Readiness(False) in front_end.heard)
    said = len(front_end.heard)
    await until(lambda: len(front_end.heard) > said)


@scene
async def test_a_front_end_that_reads_nothing_is_not_told_more_and_more(owner):
    front_end = owner.front_end()
    await until(lambda: front_end.heard)
    asyncio.get_running_loop().remove_reader(front_end.link._connected)
    (there,) = owner.relays._front_ends
    while not there._link.is_behind:
        there.send(messages.Send(9, 200, [], bytes(2**20), more=True))
        await asyncio.sleep(0)
    unsent = len(there._link._said)
    for _ in range(100):
        owner.relays._beating.cancel()
        owner.relays._beat()
    assert len(there._link._said) <= unsent


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


def test_of_many_heads_few_are_remembered(monkeypatch):
    monkeypatch.setattr(owner_module, "_MOST_KNOWN", 8)

    @scene
    async def play(owner):
        front_end = owner.front_end()
        for number in range(60):
            front_end.request(number, b"nonsense", headers=(*HEADERS, (b"x-number", b"%d" % number)))
        for number in range(60):
            assert (await front_end.answer(number)).status == 400
        await until(lambda: owner.is_idle)
        gc.collect()
        prepared = [each for each in gc.get_objects() if type(each) is Prepared and b"x-number" in each.headers]
        assert 0 < len(prepared) <= 8

    play()
