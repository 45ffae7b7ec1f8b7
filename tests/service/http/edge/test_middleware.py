"""What becomes of a request that is refused by its header."""

import asyncio

from normserve.engine.progress import Progress
from normserve.errors import InvalidParameterError
from normserve.http.edge.middleware import Edge
from normserve.http.edge.origins import Origins
from normserve.http.transport import PlainAsgi
from normserve.metrics.metrics import Metrics


def test_refusal_is_sent_before_the_body_is_received():
    """Whoever has the connection sees to the rest of the body."""
    order = []

    async def app(scope, receive, send):
        raise InvalidParameterError("wrong")

    async def receive():
        order.append("receive")
        return {"type": "http.request", "body": bytes(1000), "more_body": False}

    async def send(message):
        order.append(message["type"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/nowhere",
        "headers": [(b"content-length", b"1000")],
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    asyncio.run(PlainAsgi(Edge(app, Metrics(), Progress(), Origins(None)))(scope, receive, send))
    assert order == ["http.response.start", "http.response.body"]
