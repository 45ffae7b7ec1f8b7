"""A small call, and its answer as a server sends it."""

import numpy as np
from normserve import client as api

from .fake_server import tensors_answer

X = np.arange(6, dtype=np.float32).reshape(2, 3)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-safetensors\r\n"
RIGHT = tensors_answer(y=X).content
ANSWER = OK + b"Content-Length: %d\r\n\r\n" % len(RIGHT) + RIGHT

#: Far more than any call here is given, far less than a test may take.
TOO_LONG_S = 10.0


def normalise(client):
    return client.layer_norm(X)


def either(use, use_async):
    """What to do with a client of either kind."""
    return lambda client: (use_async if isinstance(client, api.AsyncClient) else use)(client)


def times(count):
    """Calls one after another; what the last one came to."""

    def use(client):
        return [normalise(client) for _ in range(count)][-1]

    async def use_async(client):
        return [await normalise(client) for _ in range(count)][-1]

    return either(use, use_async)
