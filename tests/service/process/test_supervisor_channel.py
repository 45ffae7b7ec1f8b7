"""What the processes of a fleet say to one another arrives whole and in order."""

import asyncio
import socket

import pytest
from normserve.process.supervisor_channel import (
    LINK,
    MESSAGE,
    READY,
    REFUSED,
    ReportReader,
    ReportWriter,
    decode_connection,
    encode_connection,
    receive_message,
    send_with_socket,
)


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        yield here, there


def test_connection_and_its_number_arrive_together(pair):
    here, there = pair
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert send_with_socket(here, 7, ours)
        assert send_with_socket(here, 8)
        number, (descriptor,) = receive_message(there)
        with socket.socket(fileno=descriptor) as received:
            received.send(b"a")
            assert (number, theirs.recv(1)) == (7, b"a")
    assert receive_message(there) == (8, [])
    with pytest.raises(BlockingIOError):
        receive_message(there)


def test_end_of_the_other_process(pair):
    here, there = pair
    here.close()
    assert receive_message(there) is None
    assert not send_with_socket(there, 1)


@pytest.mark.parametrize("step", [1, 3, 8, 20])
def test_messages_come_out_of_any_pieces(step):
    said = b"".join(map(MESSAGE.pack, [1, READY, 2**40]))
    heard = ReportReader()
    assert [n for at in range(0, 24, step) for n in heard.feed(said[at : at + step])] == [1, READY, 2**40]


@pytest.mark.parametrize("beyond", [None, "max_connections", "max_connections_per_address"])
def test_number_of_a_connection_says_which_limit_it_exceeds(beyond):
    assert decode_connection(encode_connection(2**40 + 3, beyond)) == (2**40 + 3, beyond)


@pytest.mark.parametrize("number", [LINK, READY, *REFUSED.values()])
def test_other_numbers_name_no_limit(number):
    assert decode_connection(number) == (number, None)


def test_no_report_is_lost_while_nobody_listens(pair):
    here, there = pair
    count = 5000

    async def play() -> list[int]:
        reports, heard, told = ReportWriter(here), ReportReader(), []
        for number in range(count):
            reports.send_report(number)
        while len(told) < count:
            told += heard.feed(await asyncio.get_running_loop().sock_recv(there, 4096))
        reports.send_report(count)
        return told + heard.feed(await asyncio.get_running_loop().sock_recv(there, 4096))

    assert asyncio.run(asyncio.wait_for(play(), 20)) == list(range(count + 1))
