"""Messages in the gateway never reserve more memory than there is."""

import asyncio

import pytest
from normserve.grpc import message_budget
from normserve.grpc.message_budget import MessageBudget
from normserve.grpc.statuses import CallError, Code


def test_a_reservation_is_for_the_longest_message_until_its_length_is_known():
    async def run():
        budget = MessageBudget(100, 40, 8)
        with await budget.reserve("a") as first, await budget.reserve("b"):
            assert budget.free_bytes == 20
            first.resize(5)
            assert budget.free_bytes == 55
        assert budget.free_bytes == 100

    asyncio.run(run())


def test_calls_wait_for_room_in_their_order():
    async def run():
        budget = MessageBudget(40, 40, 8)
        ended = []

        async def call(name):
            with await budget.reserve("a"):
                ended.append(name)
                await asyncio.sleep(0)

        first = await budget.reserve("a")
        waiting = [asyncio.create_task(call(name)) for name in "abc"]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        with first:
            pass
        await asyncio.gather(*waiting, return_exceptions=True)
        assert ended == ["a", "c"]
        assert budget.free_bytes == 40

    asyncio.run(run())


def test_a_call_that_waits_for_too_long_is_refused_and_told_when_to_return(monkeypatch):
    monkeypatch.setattr(message_budget, "_WAIT_S", 0.01)

    async def run():
        budget = MessageBudget(40, 40, 8)
        with await budget.reserve("a"):
            with pytest.raises(CallError) as caught:
                await budget.reserve("a")
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            assert caught.value.retry_after_s
        assert budget.free_bytes == 40

    asyncio.run(run())


def test_only_so_many_wait(monkeypatch):
    monkeypatch.setattr(message_budget, "_WAIT_S", 0.05)

    async def run():
        budget = MessageBudget(40, 40, 2)
        with await budget.reserve("a"):
            waiting = [asyncio.create_task(budget.reserve(address)) for address in "ab"]
            await asyncio.sleep(0)
            refused = asyncio.create_task(budget.reserve("c"))
            await asyncio.sleep(0)
            assert refused.done()
            with pytest.raises(CallError, match="memory"):
                await refused
            await asyncio.gather(*waiting, return_exceptions=True)
            # Those that have waited for too long make place for others.
            next_one = asyncio.create_task(budget.reserve("a"))
            await asyncio.sleep(0)
        with await next_one:
            assert budget.free_bytes == 0
        assert budget.free_bytes == 40

    asyncio.run(run())


def test_a_stream_keeps_its_room_until_it_ends():
    async def run():
        budget = MessageBudget(100, 40, 8)
        with await budget.reserve("a") as stream:
            stream.least_bytes = 40
            stream.resize(1)
            assert budget.free_bytes == 60
            stream.resize(90)
            assert budget.free_bytes == 10
        assert budget.free_bytes == 100

    asyncio.run(run())


def test_an_address_has_a_part_of_the_room_and_of_the_places_to_wait(monkeypatch):
    monkeypatch.setattr(message_budget, "_WAIT_S", 0.05)

    async def run():
        budget = MessageBudget(160, 40, 4)
        silent = [await budget.reserve("a") for _ in range(3)]
        waiting = [asyncio.create_task(budget.reserve("a")) for _ in range(3)]
        await asyncio.sleep(0)
        assert [each.done() for each in waiting] == [False, False, True]
        # Nobody else waits behind them.
        with await budget.reserve("b"):
            other = asyncio.create_task(budget.reserve("d"))
            await asyncio.sleep(0)
            assert not other.done()
        (await other).resize(0)
        refusals = [isinstance(each, CallError) for each in await asyncio.gather(*waiting, return_exceptions=True)]
        assert refusals == [True, True, True]
        silent[0].resize(0)
        (await budget.reserve("a")).resize(0)
        assert budget.free_bytes == 80

    asyncio.run(run())
