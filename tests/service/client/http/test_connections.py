"""Which connection a call gets, of threads, tasks and processes, and how long it waits for one."""

import asyncio
import contextlib
import os
import socket
import threading

import pytest
from normserve import client as api

from tests.service.client.harness.raw_server import gone, next_head
from tests.service.client.harness.small_call import ANSWER, OK, TOO_LONG_S, X, either, normalise, times

CLOSES = ANSWER.replace(b"Content-Length", b"Connection: close\r\nContent-Length")


def test_a_connection_is_used_again(ask, raw_server):
    server = raw_server([ANSWER, next_head, ANSWER])
    assert (ask(server.url, times(2)).y == X).all()
    assert len(server.heads) == 1


@pytest.mark.parametrize("kept", [[ANSWER], [CLOSES], [ANSWER, b"more"]], ids=["idle", "said", "unasked"])
def test_a_connection_that_ended_while_nobody_asked_is_not_used(ask, raw_server, kept):
    server = raw_server(kept, [b"HTTP/1.1 204 No Content\r\n\r\n"])
    closed = threading.Event()

    def closes(connected):
        # The client may have closed it already.
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_WR)
        closed.set()

    server.scripts[0].append(closes)

    def use(client):
        normalise(client)
        assert closed.wait(TOO_LONG_S)
        # What is not sent a second time.
        client.delete_layer("a")

    async def use_async(client):
        await normalise(client)
        assert closed.wait(TOO_LONG_S)
        await client.delete_layer("a")

    ask(server.url, either(use, use_async))
    assert len(server.heads) == 2


def test_a_kept_connection_that_breaks_before_an_answer_is_replaced_at_once(ask, raw_server):
    server = raw_server([ANSWER, next_head], [ANSWER])
    # There is one attempt, and the second connection belongs to it.
    assert (ask(server.url, times(2), tries=1).y == X).all()
    assert len(server.heads) == 2


def test_a_new_connection_that_breaks_is_not(ask, raw_server):
    server = raw_server([gone])
    with pytest.raises(api.ConnectionFailedError):
        ask(server.url, normalise, tries=1)
    assert len(server.heads) == 1


def test_neither_is_one_whose_answer_had_begun_nor_what_deletes(ask, raw_server):
    server = raw_server([ANSWER, next_head, b"HTTP/1.1"], [ANSWER])
    with pytest.raises(api.ConnectionFailedError):
        ask(server.url, times(2), tries=1)
    assert len(server.heads) == 1

    deleting = raw_server([ANSWER, next_head], [b"HTTP/1.1 204 No Content\r\n\r\n"])

    def use(client):
        normalise(client)
        client.delete_layer("a")

    async def use_async(client):
        await normalise(client)
        await client.delete_layer("a")

    with pytest.raises(api.ConnectionFailedError):
        ask(deleting.url, either(use, use_async), tries=1)
    assert len(deleting.heads) == 1


def test_a_cancelled_call_s_connection_is_not_used_again(raw_server):
    server = raw_server(
        [OK + b"Content-Length: 500\r\n\r\n", lambda connected: server.silence(connected)], [ANSWER]
    )

    async def main():
        async with api.AsyncClient(server.url, max_connections=1, timeout_s=5.0) as client:
            call = asyncio.create_task(client.layer_norm(X))
            while not server.heads:
                await asyncio.sleep(0.001)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await client.layer_norm(X)

    assert (asyncio.run(main()).y == X).all()
    assert len(server.heads) == 2


def test_another_event_loop_has_other_connections(raw_server):
    server = raw_server([ANSWER, next_head, b"HTTP/1.1 500 Wrong\r\n\r\n"], [ANSWER])
    client = api.AsyncClient(server.url, retries=api.RetryPolicy(tries=1))
    for _ in range(2):
        assert (asyncio.run(client.layer_norm(X)).y == X).all()
    assert len(server.heads) == 2
    asyncio.run(client.close())


def test_another_process_has_other_connections(raw_server):
    server = raw_server([ANSWER, next_head, ANSWER])
    with api.Client(server.url, retries=api.RetryPolicy(tries=1), timeout_s=TOO_LONG_S) as client:
        normalise(client)
        server.scripts.insert(0, [ANSWER])
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os._exit(0 if (normalise(client).y == X).all() else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert len(server.heads) == 2
        # The one that was there is this process's still.
        normalise(client)
    assert len(server.heads) == 2


def test_threads_share_a_client(raw_server):
    answered = [ANSWER, next_head] * 60
    server = raw_server(answered)
    wrong = []

    def calls():
        for _ in range(10):
            if not (normalise(client).y == X).all():
                wrong.append(1)

    with api.Client(server.url, max_connections=2) as client:
        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(server.heads) <= 2


def test_who_waits_for_a_connection_waits_no_longer_than_a_call_may_take(ask, raw_server):
    server = raw_server([lambda connected: server.silence(connected)])

    def late(client):
        with contextlib.suppress(api.ClientError):
            normalise(client)

    def both(client):
        other = threading.Thread(target=late, args=(client,))
        other.start()
        with pytest.raises(api.RequestTimeoutError):
            normalise(client)
        other.join()

    async def both_async(client):
        outcomes = await asyncio.gather(*(normalise(client) for _ in range(2)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {api.RequestTimeoutError}

    ask(server.url, either(both, both_async), timeout_s=0.2, max_connections=1)


def test_a_closed_client_says_so():
    client = api.Client()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.info()


def test_where_no_connection_could_be_made_is_said_without_the_password(ask, tmp_path):
    with socket.socket() as taken:
        # It has the port and does not listen.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(api.ConnectionFailedError, match=f"^127.0.0.1:{port}: .*refused") as raised:
            ask(f"http://name:secret@127.0.0.1:{port}", normalise)
    assert "secret" not in str(raised.value)
    for scheme in ("http+unix", "unix"):
        with pytest.raises(api.ConnectionFailedError, match=f"^{tmp_path}/none: .*No such file"):
            ask(f"{scheme}://{tmp_path}/none", normalise)
