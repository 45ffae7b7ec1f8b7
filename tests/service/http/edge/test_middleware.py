"""What a client hears whose body was cut off."""

import asyncio

import pytest
from normserve.engine.progress import Progress
from normserve.errors import InvalidParameterError, RequestTimeoutError
from normserve.http.edge.middleware import Edge
from normserve.http.edge.origins import Origins
from normserve.http.transport import PlainAsgi
from normserve.metrics.metrics import Metrics

SMALL = [(b"content-length", b"1000")]


def steps(is_cut_off: bool) -> list[str]:
    """What is received and sent, in order, of a small body of which no more comes for now."""
    order = []

    async def app(scope, receive, send):
        if is_cut_off:
            scope["state"]["reception"].fail(RequestTimeoutError("too slow"))
            raise RequestTimeoutError("too slow")
        raise InvalidParameterError("wrong")

    async def receive():
        order.append("receive")
        return {"type": "http.request", "body": bytes(1000), "more_body": False}

    async def send(message):
        order.append(message["type"].removeprefix("http."))
        if message["type"] == "http.response.start":
            order.append("closing" if (b"connection", b"close") in message["headers"] else "staying")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/nowhere",
        "headers": SMALL,
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    asyncio.run(PlainAsgi(Edge(app, Metrics(), Progress(), Origins(None)))(scope, receive, send))
    return order


@pytest.mark.parametrize(
    ("is_cut_off", "first"),
    [(False, ["receive", "response.start", "staying"]), (True, ["response.start", "closing"])],
    ids=["refused", "cut off"],
)
def test_the_rest_of_a_body_that_was_cut_off_is_not_waited_for(is_cut_off, first):
    assert steps(is_cut_off)[: len(first)] == first
