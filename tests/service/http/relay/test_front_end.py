"""A front end, whose connections and whose process with the device are a test's."""

import asyncio
import json
import re
import socket
from typing import Any

import pytest
from normserve.errors import HeadersTooLargeError
from normserve.http.launch_measurements import LaunchMeasurements
from normserve.http.relay import relay_messages
from normserve.http.relay.front_end import RelayApplication
from normserve.http.relay.relay_link import RelayLink
from normserve.http.transport import IncomingBody

from tests.service.http.relay.owner_scene import until

MEASURED = LaunchMeasurements(0.0, 0.5, 0.0, 0.25, 0.0, 64, 256.0, 2)


class Owner:
    """A process that owns a device, as far as its messages go."""

    def __init__(self, front_end: RelayApplication) -> None:
        here, there = socket.socketpair()
        front_end.connect_owner(here)
        self.heard: list[Any] = []
        self.link = RelayLink(there, relay_messages.from_front_end, self.heard.append, lambda: None)

    def heard_of(self, kind: type) -> list[Any]:
        return [each for each in self.heard if type(each) is kind]

    async def hear(self, kind: type, count: int = 1) -> list[Any]:
        await until(lambda: len(self.heard_of(kind)) >= count)
        return self.heard_of(kind)

    def is_slow(self) -> None:
        """It reads nothing, and more has been said than the kernel takes."""
        asyncio.get_running_loop().remove_reader(self.link._socket)

    def reads_again(self) -> None:
        asyncio.get_running_loop().add_reader(self.link._socket, self.link._receive_messages)


class FakeSending:
    """What becomes of a response."""

    send_s, ended_at = 0.25, 0.0

    def __init__(self) -> None:
        self.on_disconnect: Any = None
        self.is_delivered: bool | None = None
        self.headers: dict[bytes, bytes] = {}
        self.responses: list[Any] = []
        self.is_cut_off = False
        self.error: Exception | None = None

    async def send_response(self, status: int, headers: Any, buffers: Any, nbytes: int) -> None:
        if self.error is not None:
            raise self.error
        self.headers = dict(headers)
        self.responses.append((status, b"".join(buffers)))
        if self.is_delivered is None:
            self.is_delivered = True

    async def abort_connection(self) -> None:
        self.is_cut_off = True

    def handle_disconnect(self) -> None:
        self.is_delivered = False
        if self.on_disconnect is not None:
            self.on_disconnect()


class Asked:
    """A request on a connection of a front end."""

    def __init__(self, front_end: RelayApplication, body: bytes = b"") -> None:
        self.sending = FakeSending()
        reception = IncomingBody(len(body), lambda: bytearray(body))
        reception.mark_complete()
        self.sent: list[Any] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/layer_norm",
            "raw_path": b"/v1/layer_norm",
            "query_string": b"",
            "headers": ((b"host", b"localhost"),),
            "http_version": "1.1",
            "scheme": "http",
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 4000),
            "state": {"reception": reception, "sending": self.sending},
        }
        self.task = asyncio.ensure_future(front_end(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        raise AssertionError

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if not message.get("more_body", True):
            self.sending.is_delivered = True


async def fill(owner: Owner, front_end: RelayApplication) -> None:
    """Have more to say than the kernel takes."""
    owner.is_slow()
    link = front_end._owners[0].link
    while not link.is_backlogged:
        link.send_message(relay_messages.BodyPart(10**6, bytes(2**20), more=True))
        await asyncio.sleep(0)


def test_a_request_goes_along_and_its_response_comes_back():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        asked = Asked(front_end, b"whole")
        (request,) = await owner.hear(relay_messages.RequestStarted)
        assert (request.body, request.content_length) == (b"whole", 5)
        assert relay_messages.read_head(request.head).path == "/v1/layer_norm"
        assert front_end.is_busy
        owner.link.send_message(relay_messages.CompleteResponse(request.number, 200, [], [b"of ", b"it"], 5))
        await asked.task
        assert asked.sending.responses == [(200, b"of it")]
        assert await owner.hear(relay_messages.ResponseSent) == [
            relay_messages.ResponseSent(request.number, 0.25, is_delivered=True)
        ]
        assert not front_end.is_busy
        owner.link.close()

    asyncio.run(run())


def test_a_result_is_sent_under_the_requests_own_id():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        asked = Asked(front_end, b"whole")
        (request,) = await owner.hear(relay_messages.RequestStarted)
        assert re.fullmatch("[0-9a-f]{32}", request.request_id)
        owner.link.send_message(
            relay_messages.OperationResponse(request.number, "application/x-npy", MEASURED, [], [b"of ", b"it"])
        )
        await asked.task
        assert asked.sending.responses == [(200, b"of it")]
        assert asked.sending.headers[b"x-request-id"] == request.request_id.encode()
        assert asked.sending.headers[b"x-batch-size"] == b"2"
        owner.link.close()

    asyncio.run(run())


def test_a_request_waits_for_a_process_that_is_behind():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        await fill(owner, front_end)
        link = front_end._owners[0].link
        said = len(link._pending_messages)
        stays, leaves = Asked(front_end), Asked(front_end)
        await asyncio.sleep(0.01)
        # However many come and go meanwhile, they take no memory of the link.
        leaves.sending.handle_disconnect()
        await leaves.task
        assert len(link._pending_messages) <= said
        owner.reads_again()
        (request,) = await owner.hear(relay_messages.RequestStarted)
        owner.link.send_message(relay_messages.CompleteResponse(request.number, 200, [], [b"y"], 1))
        await stays.task
        assert stays.sending.responses == [(200, b"y")]
        assert owner.heard_of(relay_messages.ClientDisconnected) == leaves.sending.responses == []
        owner.link.close()

    asyncio.run(run())


def test_a_process_that_is_behind_and_ends_leaves_no_request_waiting():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        await fill(owner, front_end)
        asked = Asked(front_end)
        await asyncio.sleep(0.01)
        owner.link.close()
        await asked.task
        assert asked.sent[0]["status"] == 503

    asyncio.run(run())


def test_what_a_process_counts_is_gathered_while_it_is_behind():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        await fill(owner, front_end)
        link = front_end._owners[0].link
        said = len(link._pending_messages)
        for _ in range(1000):
            front_end.adjust_connection_count(1)
            front_end.count_refusal(HeadersTooLargeError("it is"))
            front_end.count_unread_response_disconnect()
        assert len(link._pending_messages) <= said
        owner.reads_again()
        assert await owner.hear(relay_messages.UnreadResponseCount) == [relay_messages.UnreadResponseCount(1000)]
        assert owner.heard_of(relay_messages.ConnectionCount) == [relay_messages.ConnectionCount(1000)]
        assert owner.heard_of(relay_messages.RefusalCount) == [
            relay_messages.RefusalCount(431, "headers_too_large", 1000)
        ]
        owner.link.close()

    asyncio.run(run())


def test_what_no_process_was_there_to_count_the_next_one_does():
    async def run():
        front_end = RelayApplication(0)
        gone = Owner(front_end)
        front_end.adjust_connection_count(3)
        await gone.hear(relay_messages.ConnectionCount)
        gone.link.close()
        await until(lambda: not front_end._owners)
        asked = [Asked(front_end) for _ in range(2)]
        for each in asked:
            await each.task
            assert each.sent[0]["status"] == 503
            assert b"retry-after" in dict(each.sent[0]["headers"])
            assert json.loads(each.sent[1]["body"])["code"] == "not_ready"
        front_end.count_unread_response_disconnect()
        front_end.adjust_connection_count(-1)
        owner = Owner(front_end)
        assert await owner.hear(relay_messages.UnreadResponseCount) == [relay_messages.UnreadResponseCount(1)]
        assert owner.heard_of(relay_messages.RefusalCount) == [relay_messages.RefusalCount(503, "not_ready", 2)]
        assert owner.heard_of(relay_messages.ConnectionCount) == [relay_messages.ConnectionCount(2)]
        owner.link.close()

    asyncio.run(run())


def test_of_two_processes_the_one_that_is_left_counts():
    async def run():
        front_end = RelayApplication(0)
        first, second = Owner(front_end), Owner(front_end)
        front_end.adjust_connection_count(3)
        assert await first.hear(relay_messages.ConnectionCount) == [relay_messages.ConnectionCount(3)]
        first.link.close()
        assert await second.hear(relay_messages.ConnectionCount) == [relay_messages.ConnectionCount(3)]
        second.link.close()

    asyncio.run(run())


def test_a_process_that_ends_before_a_response_has_its_requests_answered_here():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        asked = Asked(front_end)
        await owner.hear(relay_messages.RequestStarted)
        owner.link.close()
        await asked.task
        assert asked.sent[0]["status"] == 503

    asyncio.run(run())


def test_a_response_that_was_begun_is_cut_off_when_its_process_ends():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        asked = Asked(front_end)
        (request,) = await owner.hear(relay_messages.RequestStarted)
        owner.link.send_message(relay_messages.ResponsePart(request.number, 200, [], b"a part", more=True))
        assert await owner.hear(relay_messages.ResponseSent) == [
            relay_messages.ResponseSent(request.number, 0.25, is_delivered=False)
        ]
        owner.link.close()
        await asked.task
        assert asked.sending.is_cut_off
        assert [each.get("status") for each in asked.sent] == [200, None]

    asyncio.run(run())


def test_a_client_that_leaves_is_told_of_at_once():
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        asked = Asked(front_end)
        (request,) = await owner.hear(relay_messages.RequestStarted)
        asked.sending.handle_disconnect()
        assert await owner.hear(relay_messages.ClientDisconnected) == [
            relay_messages.ClientDisconnected(request.number)
        ]
        owner.link.send_message(relay_messages.CompleteResponse(request.number, 200, [], [b"y"], 1))
        await asked.task
        assert await owner.hear(relay_messages.ResponseSent) == [
            relay_messages.ResponseSent(request.number, 0.25, is_delivered=False)
        ]
        owner.link.close()

    asyncio.run(run())


def test_a_fault_of_a_request_ends_it_on_the_other_side():
    """Else its permit would never come home."""

    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        asked = Asked(front_end)
        asked.sending.error = ZeroDivisionError()
        (request,) = await owner.hear(relay_messages.RequestStarted)
        owner.link.send_message(relay_messages.CompleteResponse(request.number, 200, [], [b"y"], 1))
        with pytest.raises(ZeroDivisionError):
            await asked.task
        assert await owner.hear(relay_messages.ResponseSent) == [
            relay_messages.ResponseSent(request.number, 0.0, is_delivered=False)
        ]
        assert owner.heard_of(relay_messages.ClientDisconnected) == [
            relay_messages.ClientDisconnected(request.number)
        ]
        owner.link.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (
            relay_messages.CompleteResponse(77, 200, [], [], 0),
            relay_messages.ResponseSent(77, 0.0, is_delivered=False),
        ),
        (
            relay_messages.OperationResponse(77, "", MEASURED, [], []),
            relay_messages.ResponseSent(77, 0.0, is_delivered=False),
        ),
        (
            relay_messages.ResponsePart(77, 200, [], b"", more=True),
            relay_messages.ResponseSent(77, 0.0, is_delivered=False),
        ),
        (
            relay_messages.BodyIntoSlabRequest(77, 1, 2, 3),
            relay_messages.BodyAborted(77, is_client_disconnected=True),
        ),
        (relay_messages.BodyPartRequest(77, all=True), relay_messages.BodyAborted(77, is_client_disconnected=True)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_is_said_of_a_request_that_is_over_is_answered(said, answer):
    async def run():
        front_end = RelayApplication(0)
        owner = Owner(front_end)
        for each in (relay_messages.BodyStopRequest(77), relay_messages.ResponseAborted(77), said):
            owner.link.send_message(each)
        assert await owner.hear(type(answer)) == [answer]
        assert [type(each) for each in owner.heard] == [relay_messages.FrontEndHello, type(answer)]
        owner.link.close()

    asyncio.run(run())
