"""The process that owns a device, whose device does what a test says, and a front end that a test speaks for."""

import asyncio
import io
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import numpy as np
import pytest
from normserve.http.app import create_app
from normserve.http.application_services import ApplicationServices
from normserve.http.middleware.request_middleware import choose_request_id
from normserve.http.relay import relay_messages
from normserve.http.relay.relay_link import RelayLink
from normserve.http.relay.relay_server import RelayServer
from normserve.settings import Settings

from tests.service.engine.fake_engine import FakeExecutor

HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/x-npy"), (b"x-request-id", b"asked"))
CLIENT = "127.0.0.1", 4000


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


X = np.arange(12, dtype=np.float32).reshape(3, 4)
BODY = npy(X)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


class SpokenFor:
    """A front end's end of a link."""

    def __init__(self, connected: socket.socket, index: int) -> None:
        self.heard: list[Any] = []
        self.ended = 0
        self._request_ids: dict[int, str] = {}
        self.link = RelayLink(connected, relay_messages.from_owner, self.heard.append, self._end)
        self.link.send_message(relay_messages.FrontEndHello(index, 1000 + index))

    def _end(self) -> None:
        self.ended += 1

    def request(
        self,
        number: int,
        body: bytes | None = BODY,
        *,
        path: str = "/v1/layer_norm",
        query: bytes = b"",
        method: str = "POST",
        headers: Any = HEADERS,
        announced: int | None = None,
        client: Any = CLIENT,
    ) -> None:
        """Relay a request whose body came with its header."""
        if body is not None:
            headers = (*headers, (b"content-length", b"%d" % len(body)))
            announced = len(body)
        head = relay_messages.RequestHead(
            method, path, path.encode(), query, headers, "1.1", "http", ("localhost", 80)
        )
        came = bytearray(body) if body else None
        encoded = relay_messages.encode(head)
        request_id = self._request_ids[number] = choose_request_id(dict(headers))
        self.link.send_message(
            relay_messages.RequestStarted(number, encoded, client, announced, came, time.perf_counter(), request_id)
        )

    def said_of(self, number: int) -> list[Any]:
        """What has been said of a request."""
        return [each for each in self.heard if getattr(each, "number", None) == number]

    async def answer(self, number: int, took_s: float = 0.001) -> Any:
        """The response to a request, which is sent as soon as it comes, and sending it takes some time."""
        await until(lambda: [each for each in self.said_of(number) if isinstance(each, ANSWERS)])
        (answer,) = [each for each in self.said_of(number) if isinstance(each, ANSWERS)]
        ended = time.perf_counter() + took_s
        self.link.send_message(relay_messages.ResponseSent(number, took_s, is_delivered=True, ended=ended))
        return (
            answer.make_response(self._request_ids[number])
            if isinstance(answer, relay_messages.OperationResponse)
            else answer
        )


ANSWERS = relay_messages.OperationResponse, relay_messages.CompleteResponse, relay_messages.ResponsePart


class OwnerScene:
    """The whole application, on a device that a test obeys."""

    def __init__(self, *, is_direct: bool = True, **settings: Any) -> None:
        self.executor = FakeExecutor()
        with mock.patch("normserve.http.application_services.Executor", return_value=self.executor):
            self.app = create_app(Settings(**{"backend": "torch", "frontends": "2", **settings}))
        self.service: ApplicationServices = self.app.state.service
        self.relays: RelayServer = self.app.state.relays
        if not is_direct:
            self.relays.set_application(self.app.state.entrance, None)
        self.records: list[Any] = []
        observe = self.service.metrics.observe_request

        def note(record: Any) -> None:
            self.records.append(record)
            observe(record)

        self.service.metrics.observe_request = note  # type: ignore[method-assign]
        self._front_ends: list[SpokenFor] = []

    async def open(self) -> None:
        await self.service.engine.start()
        self.service.engine.accept_jobs()
        self.relays.report_readiness(ready=True)

    def front_end(self) -> SpokenFor:
        here, there = socket.socketpair()
        self.relays.serve_front_end(there)
        self._front_ends.append(SpokenFor(here, len(self._front_ends)))
        return self._front_ends[-1]

    async def close(self) -> None:
        for each in self._front_ends:
            each.link.close()
        await until(lambda: not self.relays.describe_front_ends())
        await self.relays.close(0)

    @property
    def is_idle(self) -> bool:
        """Nothing is admitted any more."""
        limits = self.service.admission_budget
        return (
            limits.request_count,
            limits.used_bytes,
            self.service.stall_detector.request_progress.stalled_s,
        ) == (0, 0, 0.0)


Play = Callable[[OwnerScene], Coroutine[Any, Any, None]]


def scene(play: Play) -> Callable[[], None]:
    """A test that is a coroutine and is given a process that is ready."""

    def test() -> None:
        asyncio.run(_play(OwnerScene(), play))

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


def either_way(play: Play) -> Callable[[bool], None]:
    """The same, once with operations answered directly and once by the application."""

    @pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "application"])
    def test(is_direct: bool) -> None:
        asyncio.run(_play(OwnerScene(is_direct=is_direct), play))

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


async def _play(owner: OwnerScene, play: Play) -> None:
    await owner.open()
    try:
        await play(owner)
    finally:
        await owner.close()
