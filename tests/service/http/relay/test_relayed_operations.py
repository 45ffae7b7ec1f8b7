"""Operations whose body came along, which are answered without the application."""

import asyncio
import dataclasses

import numpy as np
import pytest
from normserve.http.relay import relay_messages

from tests.service.http.relay.owner_scene import OwnerScene, either_way, npy, until


async def running(owner: OwnerScene, front_end) -> None:
    """One request runs on the device."""
    front_end.request(1)
    await until(lambda: owner.executor.running)
    assert owner.service.admission_budget.request_count == 1


@either_way
async def test_a_permit_comes_home_when_the_work_is_over_though_its_front_end_is_gone(owner):
    front_end = owner.front_end()
    await running(owner, front_end)
    front_end.link.close()
    await until(lambda: not owner.relays.describe_front_ends())
    # The device has not ended it.
    assert owner.service.admission_budget.request_count == 1
    owner.executor.finish()
    await until(lambda: owner.is_idle)
    assert [(each.status, each.error_code) for each in owner.records] == [(499, None)]


@either_way
async def test_what_waits_is_not_run_for_a_front_end_that_is_gone(owner):
    other, front_end = owner.front_end(), owner.front_end()
    await running(owner, other)
    front_end.request(1)
    await until(lambda: owner.service.admission_budget.request_count == 2)
    front_end.link.close()
    await until(lambda: owner.service.admission_budget.request_count == 1)
    assert [each.status for each in owner.records] == [499]
    owner.executor.finish()
    assert (await other.answer(1)).status == 200
    await until(lambda: owner.is_idle)
    assert not owner.executor.running


@either_way
async def test_a_permit_is_kept_until_the_work_is_over_of_a_client_that_left(owner):
    front_end = owner.front_end()
    await running(owner, front_end)
    front_end.link.send_message(relay_messages.ClientDisconnected(1))
    # Answered in order: the departure has been heard.
    front_end.request(2, method="GET", path="/livez", body=None, announced=0)
    assert (await front_end.answer(2)).status == 200
    assert front_end.said_of(1) == []
    assert owner.service.admission_budget.request_count == 1
    owner.executor.finish()
    await until(lambda: front_end.said_of(1))
    front_end.link.send_message(relay_messages.ResponseSent(1, 0.0, is_delivered=False))
    await until(lambda: owner.is_idle)
    assert [(each.op, each.status) for each in owner.records if each.op == "layer_norm"] == [("layer_norm", 499)]


def out_of_memory(nbytes: int):
    raise MemoryError(nbytes)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "application"])
@pytest.mark.parametrize("rows", [64, 1024], ids=["copied at once", "copied by a thread"])
def test_a_result_that_there_is_no_memory_to_send_from_is_an_answer_too(rows, is_direct):
    async def play() -> None:
        owner = OwnerScene(is_direct=is_direct)
        await owner.open()
        front_end = owner.front_end()
        front_end.request(1, npy(np.zeros((rows, 1024), np.float32)))
        await until(lambda: owner.executor.running)
        slabs = owner.service.slab_pool
        slabs.source = dataclasses.replace(slabs.source, allocate=out_of_memory)
        owner.executor.finish()
        answer = await front_end.answer(1)
        assert answer.status == 503
        await until(lambda: owner.records)
        assert owner.is_idle
        [record] = owner.records
        assert (record.status, record.error_code, record.sent_bytes) == (
            503,
            "device_out_of_memory",
            len(answer.data),
        )
        await owner.close()

    asyncio.run(asyncio.wait_for(play(), 20))
