"""Links that end though both processes are there come again, and no two processes keep two of them."""

import asyncio
import os
import socket

from normserve.http.relay import relay_messages
from normserve.http.relay.front_end import RelayApplication
from normserve.http.relay.relay_link import RelayLink
from normserve.http.relay.relay_server import RelayServer
from normserve.memory.shared_slabs import SharedSlabRegistry
from normserve.memory.slabs import SlabPool
from normserve.metrics.metrics import Metrics
from normserve.requests.prepared_calls import PreparedCallCache


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def relays():
    shared = SharedSlabRegistry()
    metrics = Metrics()
    prepared = PreparedCallCache(2**20, metrics.get_prepared_call_counters("process"))
    return RelayServer(shared, SlabPool(max_idle_bytes=0, source=shared.make_allocator()), metrics, prepared)


def link(front_end, owner):
    here, there = socket.socketpair()
    front_end.connect_owner(here)
    owner.serve_front_end(there)


def test_a_second_link_with_the_same_process_is_ended_without_another_being_wanted():
    async def run():
        front_end, owner, lost = RelayApplication(1), relays(), []
        front_end.on_link_lost = lambda: lost.append(1)
        link(front_end, owner)
        await until(lambda: front_end._owners[0].has_sent_message)
        (kept,) = front_end._owners
        link(front_end, owner)
        await until(lambda: front_end._owners == [kept])
        assert owner.describe_front_ends() == [{"index": 1, "pid": os.getpid()}]
        assert lost == []
        await owner.close(0)
        await until(lambda: lost == [1])

    asyncio.run(run())


def test_processes_of_their_own_keep_theirs():
    async def run():
        first, second, owner = RelayApplication(0), RelayApplication(1), relays()
        link(first, owner)
        link(second, owner)
        await until(lambda: all(each._owners[0].has_sent_message for each in (first, second)))
        assert [each["index"] for each in owner.describe_front_ends()] == [0, 1]
        await owner.close(0)

    asyncio.run(run())


def test_memory_that_cannot_be_mapped_ends_the_link():
    async def run():
        front_end, lost = RelayApplication(0), []
        front_end.on_link_lost = lambda: lost.append(1)
        here, there = socket.socketpair()
        front_end.connect_owner(here)
        owner = RelayLink(there, relay_messages.from_front_end, lambda message: None, lambda: None)
        descriptor = os.open("/dev/zero", os.O_RDONLY)
        owner.send_message(relay_messages.OwnerReadiness(is_ready=True))
        owner.send_message(relay_messages.SharedSlabAdded(1), descriptor)
        os.close(descriptor)
        await until(lambda: not owner.is_open)
        assert lost == [1]
        assert front_end._owners == []

    asyncio.run(run())
