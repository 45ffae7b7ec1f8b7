"""What a closed client leaves: nothing, unless somebody has a result still."""

import asyncio
import gc
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from normserve.client import AsyncClient, Client, ConnectionFailedError, RequestTimeoutError, RetryPolicy
from normserve.codec import local_messages as frames

from tests.garbage_collector import without_collector
from tests.service.client.local.test_connection import send_segment, serving

ONCE = RetryPolicy(tries=1)


class SilentServer:
    """Hands over memory, and never answers an operation."""

    def __init__(self) -> None:
        self.has_request = threading.Event()

    def answer(self, connected, tag, message):
        if isinstance(message, frames.GrowArenaMessage):
            send_segment(connected, tag)
        elif isinstance(message, frames.ComputeMessage):
            self.has_request.set()


def held() -> tuple[int, int]:
    """How many descriptors and mappings of shared memory this process has."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), mapping_count()


def mapping_count() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:normserve")


def wait_until_unmapped(expected: int) -> None:
    """Wait without a garbage collection; the server's thread maps what it sends for a moment."""
    deadline = time.monotonic() + 10
    while mapping_count() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mapping_count() == expected


def wait_until_held(expected: tuple[int, int]) -> None:
    deadline = time.monotonic() + 10
    while held() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() == expected


def time_out(path: str) -> None:
    with Client(f"unix://{path}", timeout_s=0.05, retries=ONCE) as client, pytest.raises(RequestTimeoutError):
        client.layer_norm(np.ones((4, 4), np.float32))


async def time_out_in_a_task(path: str) -> None:
    async with AsyncClient(f"unix://{path}", timeout_s=0.05, retries=ONCE) as client:
        with pytest.raises(RequestTimeoutError):
            await client.layer_norm(np.ones((4, 4), np.float32))


@pytest.mark.parametrize("call", [time_out, lambda path: asyncio.run(time_out_in_a_task(path))])
def test_a_client_closed_after_a_timeout_keeps_nothing(tmp_path, call):
    path = str(tmp_path / "socket")
    with serving(path, SilentServer().answer, connections=3):
        before = held()
        for _ in range(3):
            call(path)
            # Of the server's end as well, which ends with the client's.
            wait_until_held(before)


def test_a_result_outlives_a_client_closed_after_a_timeout(tmp_path):
    path = str(tmp_path / "socket")
    with serving(path, SilentServer().answer):
        before = held()
        # So long that memory comes within it on a busy machine, too.
        with Client(f"unix://{path}", timeout_s=1.0, retries=ONCE) as client:
            x = client.empty((4, 4))
            x[:] = 3
            with pytest.raises(RequestTimeoutError):
                client.layer_norm(x)
        assert (x == 3).all()
        assert held() > before
        del x
        wait_until_unmapped(before[1])


def test_a_call_that_times_out_after_the_client_was_closed_keeps_nothing(tmp_path):
    path = str(tmp_path / "socket")
    server = SilentServer()
    with serving(path, server.answer):
        before = held()
        client = Client(f"unix://{path}", timeout_s=0.4, retries=ONCE)

        def call():
            with pytest.raises(RequestTimeoutError):
                client.layer_norm(np.ones((4, 4), np.float32))

        caller = threading.Thread(target=call)
        caller.start()
        server.has_request.wait(20)
        client.close()
        caller.join(20)
        wait_until_unmapped(before[1])


def test_a_client_closed_after_its_connection_broke_keeps_nothing(tmp_path):
    def answer(connected, tag, message):
        if isinstance(message, frames.GrowArenaMessage):
            send_segment(connected, tag)
        return isinstance(message, frames.ComputeMessage)

    path = str(tmp_path / "socket")
    with serving(path, answer):
        before = held()
        with Client(f"unix://{path}", retries=ONCE) as client, pytest.raises(ConnectionFailedError):
            client.layer_norm(np.ones((4, 4), np.float32))
        wait_until_unmapped(before[1])


def normalise(path: str) -> None:
    with Client(f"unix://{path}", retries=ONCE) as client:
        client.layer_norm(np.ones((4, 4), np.float32))


def time_out_quietly(path: str) -> None:
    with Client(f"unix://{path}", timeout_s=0.05, retries=ONCE) as client, suppress(RequestTimeoutError):
        client.layer_norm(np.ones((4, 4), np.float32))


def answer_at_once(connected, tag, message):
    if isinstance(message, frames.GrowArenaMessage):
        send_segment(connected, tag)
    elif isinstance(message, frames.ComputeMessage):
        place = message.results["y"]
        results = {"y": frames.TensorReference(place.segment, place.offset, "float32", (4, 4))}
        connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, "id", results)))


@pytest.mark.parametrize(
    ("answer", "call"),
    [(answer_at_once, normalise), (SilentServer().answer, time_out_quietly)],
    ids=["normal", "late"],
)
def test_a_closed_client_does_not_wait_for_the_garbage_collector(tmp_path, answer, call):
    path = str(tmp_path / "socket")
    with serving(path, answer):
        before = held()[1]
        with without_collector():
            call(path)
            wait_until_unmapped(before)


def test_a_closed_client_does_not_connect_again(tmp_path):
    with serving(str(tmp_path / "socket"), answer_at_once, connections=2):
        client = Client(f"unix://{tmp_path}/socket", retries=ONCE)
        client.empty((4, 4))
        client.close()
        for call in (client.info, lambda: client.empty((4, 4))):
            with pytest.raises(RuntimeError, match="the client is closed"):
                call()

        async def close_and_call():
            client = AsyncClient(f"unix://{tmp_path}/socket", retries=ONCE)
            await client.empty((4, 4))
            await client.close()
            with pytest.raises(RuntimeError, match="the client is closed"):
                await client.info()

        asyncio.run(close_and_call())
