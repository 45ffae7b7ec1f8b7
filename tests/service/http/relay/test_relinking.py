"""Links that end though both processes are there come again, and no two processes keep two of them."""

import asyncio
import os
import socket

from normserve.http.relay import messages
from normserve.http.relay.front_end import FrontEnd
from normserve.http.relay.link import Link
from normserve.http.relay.owner import Relays
from normserve.memory.shared_slabs import SharedSlabs
from normserve.memory.slabs import SlabPool
from normserve.metrics.metrics import Metrics
from normserve.requests.prepared_calls import PreparedCalls


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def relays():
    shared = SharedSlabs()
    metrics = Metrics()
    prepared = PreparedCalls(2**20, metrics.prepared_call_counters("process"))
    return Relays(shared, SlabPool(max_idle_bytes=0, source=shared.source()), metrics, prepared)


def link(front_end, owner):
    here, there = socket.socketpair()
    front_end.connect(here)
    owner.serve(there)


def test_a_second_link_with_the_same_process_is_ended_without_another_being_wanted():
    async def run():
        front_end, owner, lost = FrontEnd(1), relays(), []
        front_end.on_link_lost = lambda: lost.append(1)
        link(front_end, owner)
        await until(lambda: front_end._owners[0].was_heard)
        (kept,) = front_end._owners
        link(front_end, owner)
        await until(lambda: front_end._owners == [kept])
        assert owner.described() == [{"index": 1, "pid": os.getpid()}]
        assert lost == []
        await owner.close(0)
        await until(lambda: lost == [1])

    asyncio.run(run())


def test_processes_of_their_own_keep_theirs():
    async def run():
        first, second, owner = FrontEnd(0), FrontEnd(1), relays()
        link(first, owner)
        link(second, owner)
        await until(lambda: all(each._owners[0].was_heard for each in (first, second)))
        assert [each["index"] for each in owner.described()] == [0, 1]
        await owner.close(0)

    asyncio.run(run())


def test_memory_that_cannot_be_mapped_ends_the_link():
    async def run():
        front_end, lost = FrontEnd(0), []
        front_end.on_link_lost = lambda: lost.append(1)
        here, there = socket.socketpair()
        front_end.connect(here)
        owner = Link(there, messages.from_front_end, lambda message: None, lambda: None)
        descriptor = os.open("/dev/zero", os.O_RDONLY)
        owner.send(messages.Readiness(is_ready=True))
        owner.send(messages.Memory(1), descriptor)
        os.close(descriptor)
        await until(lambda: not owner.is_open)
        assert lost == [1]
        assert front_end._owners == []

    asyncio.run(run())
