"""The socket between a front end and a process that owns a device: all in order, whatever the kernel takes."""

import asyncio
import os
import resource
import socket
from pathlib import Path

import pytest
import uvloop
from normserve.codec.framing import PREFIX
from normserve.http.relay import relay_messages
from normserve.http.relay.relay_link import RelayLink

from tests.service.engine.fake_polling import FakePolling


class End:
    """One end, and what it heard."""

    def __init__(self, connected, decoder, **how):
        self.heard, self.ended, self.faulty = [], 0, None
        self.link = RelayLink(connected, decoder, self._hear, self._end, **how)

    def _hear(self, message):
        if message == self.faulty:
            raise ZeroDivisionError
        descriptor = self.link.pop_descriptor() if isinstance(message, relay_messages.SharedSlabAdded) else None
        self.heard.append(message if descriptor is None else (message.number, os.fstat(descriptor).st_ino))
        if descriptor is not None:
            os.close(descriptor)

    def _end(self):
        self.ended += 1


def linked(**how):
    here, there = socket.socketpair()
    return End(here, relay_messages.from_front_end, **how), End(there, relay_messages.from_owner)


def faults_of(loop):
    """What callbacks of a loop raise from now on."""
    faults = []
    loop.call_exception_handler = lambda context: faults.append(type(context["exception"]))
    return faults


def named(descriptor):
    """What a descriptor is of; it may be closed by now."""
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_messages_and_descriptors_come_in_order():
    async def run():
        owner, front_end = linked()
        files = [os.memfd_create("one"), os.memfd_create("two")]
        inodes = [os.fstat(each).st_ino for each in files]
        owner.link.send_message(relay_messages.OwnerReadiness(True))
        owner.link.send_message(relay_messages.SharedSlabAdded(1), files[0])
        owner.link.send_message(relay_messages.BodyPartRequest(7, all=True))
        owner.link.send_message(relay_messages.SharedSlabAdded(2), files[1])
        # They stay the caller's.
        for each in files:
            os.close(each)
        owner.link.send_message(relay_messages.SharedSlabRemoved([1]))
        await until(lambda: len(front_end.heard) == 5)
        assert front_end.heard == [
            relay_messages.OwnerReadiness(True),
            (1, inodes[0]),
            relay_messages.BodyPartRequest(7, all=True),
            (2, inodes[1]),
            relay_messages.SharedSlabRemoved([1]),
        ]
        owner.link.close()
        front_end.link.close()

    asyncio.run(run())


def open_files(name):
    """Descriptors of this process that are of a memory file of that name."""
    return [each for each in Path("/proc/self/fd").iterdir() if f"memfd:{name}" in named(each)]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_descriptor_that_was_sent_is_the_callers_and_the_others_alone(is_full):
    async def run():
        owner, front_end = linked()
        if is_full:
            owner.link.send_message(relay_messages.ResponsePart(1, 200, [], bytes(2**24), more=False))
        file = os.memfd_create("sent")
        for number in range(5):
            owner.link.send_message(relay_messages.SharedSlabAdded(number), file)
        await until(lambda: len(front_end.heard) == 5 + is_full)
        await owner.link.wait_flushed()
        assert len(open_files("sent")) == 1
        os.close(file)
        owner.link.close()
        front_end.link.close()

    asyncio.run(run())


def test_descriptors_that_nobody_has_taken_are_closed_with_the_link():
    async def run():
        owner, front_end = linked()
        # Who hears of them takes none.
        front_end.link.pop_descriptor = lambda: os.open(os.devnull, os.O_RDONLY)
        file = os.memfd_create("left")
        for number in range(3):
            owner.link.send_message(relay_messages.SharedSlabAdded(number), file)
        os.close(file)
        await until(lambda: len(front_end.heard) == 3)
        assert len(open_files("left")) == 3
        front_end.link.close()
        assert not open_files("left")
        owner.link.close()

    asyncio.run(run())


def test_more_than_the_kernel_takes_waits_and_comes_whole():
    async def run():
        owner, front_end = linked()
        data = bytes(range(256)) * 4096
        file = os.memfd_create("late")
        inode = os.fstat(file).st_ino
        for number in range(30):
            owner.link.send_message(relay_messages.ResponsePart(number, 200, [], data, more=False))
        owner.link.send_message(relay_messages.SharedSlabAdded(3), file)
        owner.link.send_message(relay_messages.ResponseAborted(31))
        os.close(file)
        drained = asyncio.get_running_loop().create_task(owner.link.wait_flushed())
        await until(lambda: len(front_end.heard) == 32)
        await drained
        assert [each.number for each in front_end.heard[:30]] == list(range(30))
        assert all(each.data == data for each in front_end.heard[:30])
        assert front_end.heard[30:] == [(3, inode), relay_messages.ResponseAborted(31)]
        owner.link.close()
        front_end.link.close()

    asyncio.run(run())


def test_a_message_cut_anywhere_is_heard_once_it_is_whole():
    async def run():
        here, there = socket.socketpair()
        end = End(there, relay_messages.from_owner)
        response = relay_messages.CompleteResponse(
            5, 200, [(b"a", b"b")], [b"xyz", relay_messages.SharedSlabRange(1, 2, 3)], 6
        )
        content = relay_messages.encode([response, relay_messages.ResponseAborted(6)])
        with here:
            for byte in PREFIX.pack(len(content), 0) + content:
                assert end.heard == []
                here.sendall(bytes([byte]))
                await asyncio.sleep(0)
            await until(lambda: end.heard)
        assert end.heard == [response, relay_messages.ResponseAborted(6)]
        end.link.close()

    asyncio.run(run())


@pytest.mark.parametrize("closes", ["here", "there"])
def test_the_end_is_told_once_and_nothing_is_said_after_it(closes):
    async def run():
        owner, front_end = linked()
        file = os.memfd_create("unsent")
        owner.link.send_message(relay_messages.SharedSlabAdded(1), file)
        os.close(file)
        (owner if closes == "here" else front_end).link.close()
        await until(lambda: owner.ended and front_end.ended)
        owner.link.send_message(relay_messages.OwnerReadiness(True))
        owner.link.close()
        front_end.link.close()
        await owner.link.wait_flushed()
        assert (owner.ended, front_end.ended) == (1, 1)
        # What went along with a message that nobody took is closed.
        await until(lambda: not [each for each in Path("/proc/self/fd").iterdir() if "unsent" in named(each)])

    asyncio.run(run())


def test_what_waits_for_room_is_let_go_when_the_other_is_gone():
    async def run():
        owner, front_end = linked()
        for number in range(30):
            owner.link.send_message(relay_messages.ResponsePart(number, 200, [], bytes(2**20), more=False))
        drained = asyncio.get_running_loop().create_task(owner.link.wait_flushed())
        await asyncio.sleep(0)
        front_end.link.close()
        await asyncio.wait_for(drained, 20)
        await until(lambda: owner.ended == 1)

    asyncio.run(run())


def test_a_lost_descriptor_ends_the_link_before_another_takes_its_place():
    """As where none is free: the message comes, what belongs to it does not."""

    async def run():
        owner, front_end = linked()
        # It reads when descriptors are short, not before.
        asyncio.get_running_loop().remove_reader(front_end.link._socket)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with Path("/dev/zero").open("rb") as file:
            owner.link.send_message(relay_messages.SharedSlabAdded(1), file.fileno())
            owner.link.send_message(relay_messages.SharedSlabAdded(2), file.fileno())
            await until(lambda: not owner.link._send_queue)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                front_end.link._receive_messages()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (front_end.ended, front_end.heard) == (1, [])
        await until(lambda: owner.ended == 1)

    asyncio.run(run())


def test_a_callback_that_raises_ends_the_link():
    """The messages that came with the one that it was given will not be answered."""

    async def run():
        owner, front_end = linked()
        faults = faults_of(asyncio.get_running_loop())
        front_end.faulty = relay_messages.ResponseAborted(2)
        for number in range(1, 5):
            owner.link.send_message(relay_messages.ResponseAborted(number))
        await until(lambda: owner.ended and front_end.ended)
        assert front_end.heard == [relay_messages.ResponseAborted(1)]
        assert (owner.ended, front_end.ended, faults) == (1, 1, [ZeroDivisionError])

    asyncio.run(run())


def test_a_message_that_cannot_be_encoded_ends_the_link():
    async def run():
        owner, front_end = linked()
        faults = faults_of(asyncio.get_running_loop())
        owner.link.send_message(relay_messages.ResponseAborted(object()))
        owner.link.send_message(relay_messages.ResponseAborted(1))
        await until(lambda: owner.ended and front_end.ended)
        assert (front_end.heard, faults) == ([], [TypeError])
        # Nothing is kept for it any more.
        owner.link.send_message(relay_messages.ResponseAborted(2))
        assert not owner.link._pending_messages

    asyncio.run(run())


def test_a_long_backlog_is_heard_in_one_go_and_in_order():
    async def run():
        owner, front_end = linked()
        asyncio.get_running_loop().remove_reader(front_end.link._socket)
        while not owner.link.is_backlogged:
            owner.link.send_message(relay_messages.ResponsePart(0, 200, [], bytes(2**20), more=True))
            await asyncio.sleep(0)
        said = [
            relay_messages.ResponsePart(number, 0, [], bytes([number]) * 2**18, more=True) for number in range(64)
        ]
        for each in said:
            owner.link.send_message(each)
        asyncio.get_running_loop().add_reader(front_end.link._socket, front_end.link._receive_messages)
        await until(lambda: front_end.heard and front_end.heard[-1].number == 63)
        assert front_end.heard[-64:] == said
        owner.link.close()
        front_end.link.close()

    asyncio.run(run())


def test_a_message_that_cannot_be_read_ends_the_link():
    async def run():
        here, there = socket.socketpair()
        end = End(there, relay_messages.from_owner)
        faults = faults_of(asyncio.get_running_loop())
        with here:
            here.sendall(PREFIX.pack(1, 0) + b"\xc1")
            await until(lambda: end.ended)
        assert len(faults) == 1

    asyncio.run(run())


def test_what_is_lent_stays_so_until_the_other_side_has_ended_the_link():
    """It writes until it hears of the end."""

    async def run():
        owner, front_end = linked(shares_memory=True)
        loop = asyncio.get_running_loop()
        faults = faults_of(loop)
        loop.remove_reader(front_end.link._socket)
        owner.faulty = relay_messages.ClientDisconnected(1)
        front_end.link.send_message(relay_messages.ClientDisconnected(1))
        front_end.link.send_message(relay_messages.ClientDisconnected(2))
        await until(lambda: faults)
        front_end.link.send_message(relay_messages.ClientDisconnected(3))
        owner.link.send_message(relay_messages.ResponseAborted(3))
        await asyncio.sleep(0.05)
        assert (owner.ended, owner.heard) == (0, [])
        loop.add_reader(front_end.link._socket, front_end.link._receive_messages)
        await until(lambda: owner.ended)
        assert (owner.ended, front_end.ended, front_end.heard) == (1, 1, [])
        assert faults == [ZeroDivisionError]

    asyncio.run(run())


def test_it_says_when_it_is_behind_and_when_not_any_more():
    async def run():
        owner, front_end = linked()
        loop = asyncio.get_running_loop()
        drained = []
        owner.link.on_flushed = lambda: drained.append(owner.link.is_backlogged)
        owner.link.send_message(relay_messages.ResponseAborted(1))
        await until(lambda: front_end.heard)
        assert not owner.link.is_backlogged
        loop.remove_reader(front_end.link._socket)
        for number in range(30):
            owner.link.send_message(relay_messages.ResponsePart(number, 200, [], bytes(2**20), more=False))
        await until(lambda: owner.link.is_backlogged)
        assert drained == []
        loop.add_reader(front_end.link._socket, front_end.link._receive_messages)
        await until(lambda: drained)
        assert drained == [False]
        owner.link.close()
        front_end.link.close()

    asyncio.run(run())


def test_what_comes_and_what_leaves_is_noted_for_polling():
    polling = FakePolling()

    async def run():
        here, there = linked(polling=polling)
        here.link.send_message(relay_messages.OwnerReadiness(True))
        await until(lambda: there.heard)
        assert polling.noted == ["sent"]
        there.link.send_message(relay_messages.ConnectionCount(3))
        await until(lambda: here.heard)
        assert polling.noted == ["sent", "received"]
        here.link.close()
        there.link.close()

    asyncio.run(run())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("nbytes", [1, 30 * 2**20])
@pytest.mark.parametrize("shares_memory", [False, True])
def test_a_process_that_ends_with_messages_unread_is_noticed(shares_memory, nbytes, loop):
    async def run():
        here, there = socket.socketpair()
        owner = End(here, relay_messages.from_front_end, shares_memory=shares_memory)
        owner.link.send_message(relay_messages.ResponsePart(1, 200, [], bytes(nbytes), more=False))
        await asyncio.sleep(0.01)
        there.send(b"the beginning of a frame")
        there.close()
        await until(lambda: owner.ended)

    loop(run())
