"""A relayed request that the application answers."""

import asyncio

from normserve.errors import OverloadedError
from normserve.http.relay import relay_messages
from normserve.http.relay.relayed_request import RelayedRequest

from tests.service.http.relay.test_relayed_request_exchange import FakeFrontEnd, asked

SCOPE = {"type": "http", "path": "/"}


async def turn():
    for _ in range(5):
        await asyncio.sleep(0)


class Application:
    """Receives a body or does not, and responds or does not, when the test says so."""

    def __init__(self, front_end, *, receives=False, responds=True, error=None):
        self._front_end = front_end
        self._receives, self._responds, self._error = receives, responds, error
        self.proceed = asyncio.Event()
        self.scope = None
        self.refused = None

    async def __call__(self, scope, receive, send):
        self.scope = scope
        if self._receives:
            try:
                await scope["state"]["reception"].receive_into(
                    self._front_end.slab_pool.borrow, pause_s=20.0, total_s=20.0
                )
            except Exception as error:
                self.refused = type(error).__name__
        await self.proceed.wait()
        if self._error is not None:
            raise self._error
        if self._responds:
            await scope["state"]["sending"].send_response(200, [], [b"y"], 1)


def play(test):
    def run():
        asyncio.run(test(FakeFrontEnd()))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@play
async def test_it_is_over_once_its_response_has_been_sent(front_end):
    application = Application(front_end)
    relayed = RelayedRequest(front_end, asked(5, bytearray(b"whole")), SCOPE, application)
    await turn()
    assert application.scope["client"] == ("127.0.0.1", 1)
    assert "client" not in SCOPE
    application.proceed.set()
    await turn()
    assert front_end.said == [relay_messages.CompleteResponse(3, 200, [], [b"y"], 1)]
    relayed.on_message(relay_messages.ResponseSent(3, 0.5, is_delivered=True))
    await turn()
    assert front_end.said[1:] == [("end", 3)]
    assert application.scope["state"]["sending"].is_delivered


@play
async def test_an_application_that_says_nothing_ends_it(front_end):
    application = Application(front_end, responds=False)
    RelayedRequest(front_end, asked(0), SCOPE, application)
    application.proceed.set()
    await turn()
    assert front_end.said == [relay_messages.ResponseAborted(3), ("end", 3)]


@play
async def test_an_application_that_fails_ends_it(front_end):
    application = Application(front_end, error=ZeroDivisionError())
    relayed = RelayedRequest(front_end, asked(0), SCOPE, application)
    application.proceed.set()
    await turn()
    assert front_end.said == [relay_messages.ResponseAborted(3), ("end", 3)]
    assert isinstance(relayed._task.exception(), ZeroDivisionError)


@play
async def test_its_number_is_free_once_its_body_has_no_place_any_more(front_end):
    """Who answers early does not wait for the client; the front end may write still."""
    application = Application(front_end, receives=True, responds=False)
    relayed = RelayedRequest(front_end, asked(100_000), SCOPE, application)
    await turn()
    relayed.on_progress(50)
    assert application.scope["state"]["reception"].received_bytes == 50
    relayed._incoming_body.abort(OverloadedError("no"))
    application.proceed.set()
    await turn()
    assert [type(each) for each in front_end.said[1:]] == [
        relay_messages.BodyStopRequest,
        relay_messages.ResponseAborted,
    ]
    relayed.on_message(relay_messages.BodyAborted(3, is_client_disconnected=False))
    assert front_end.said[-1] == ("end", 3)


@play
async def test_a_front_end_that_is_gone_ends_its_body_and_its_response(front_end):
    receiving, responding = Application(front_end, receives=True, responds=False), Application(front_end)
    one = RelayedRequest(front_end, asked(100_000), SCOPE, receiving)
    other = RelayedRequest(front_end, asked(0), SCOPE, responding)
    responding.proceed.set()
    await turn()
    one.on_front_end_lost()
    other.on_front_end_lost()
    receiving.proceed.set()
    await turn()
    assert one._task.done()
    assert other._task.done()
    assert receiving.refused == "ClientLeftError"
    assert responding.scope["state"]["sending"].is_delivered is False


@play
async def test_a_client_that_has_left_is_noticed_by_body_and_response(front_end):
    application = Application(front_end, receives=True)
    relayed = RelayedRequest(front_end, asked(100_000), SCOPE, application)
    await turn()
    left = []
    application.scope["state"]["sending"].on_disconnect = lambda: left.append(1)
    relayed.on_message(relay_messages.ClientDisconnected(3))
    application.proceed.set()
    await turn()
    assert (left, application.refused) == ([1], "ClientLeftError")
    assert not [each for each in front_end.said if isinstance(each, relay_messages.CompleteResponse)]
