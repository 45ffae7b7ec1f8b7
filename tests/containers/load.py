"""Clients that keep their connections and ask without pause, and what became of each request."""

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

import numpy as np

from tests.integration.harness.wire import NPY, from_npy, npy

_ROWS, _COLS = 1024, 1024
_HEADERS = {"content-type": NPY, "accept": NPY}


class Ending(Enum):
    """How a request ended.

    ANSWERED: with the right result.
    REFUSED: with a status that says to come back, before it was admitted.
    UNREACHED: there was no connection to send it on.
    CLOSED: the connection ended without a byte of a response.
    BROKEN: in any other way.
    """

    ANSWERED = "answered"
    REFUSED = "refused"
    UNREACHED = "unreached"
    CLOSED = "closed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        began: when its first byte was sent, by `time.time`.
        ended: when its fate was known.
        said: what went wrong with it, for people.
    """

    ending: Ending
    began: float
    ended: float
    said: str = ""


class Load:
    """Connections that each send one request after another, from `with` until nothing answers there any more."""

    def __init__(self, url: str, connections: int) -> None:
        address = urlsplit(url)
        self._address = (address.hostname, address.port)
        x = np.random.default_rng(0).standard_normal((_ROWS, _COLS), dtype=np.float32)
        self._body = npy(x)
        self._expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        self._enough = threading.Event()
        self._threads = ThreadPoolExecutor(connections)
        self.asked: list[Asked] = []

    def __enter__(self):
        self._running = [self._threads.submit(self._ask_on) for _ in range(self._threads._max_workers)]
        return self

    def __exit__(self, *exc):
        self._enough.set()
        self._threads.shutdown()
        for each in self._running:
            each.result()

    def count(self, across: float | None = None) -> Counter[Ending]:
        """Requests by how they ended; only those that were under way at a moment, if one is given."""
        asked = list(self.asked)
        return Counter(each.ending for each in asked if across is None or each.began < across < each.ended)

    def lost(self, drained: float) -> list[Asked]:
        """Requests that were, or may have been, admitted and that nobody answered.

        Args: drained: when the server began to refuse: of what came later a closed connection is the refusal.
        """
        return [
            each
            for each in self.asked
            if each.ending is Ending.BROKEN or (each.ending is Ending.CLOSED and each.began < drained)
        ]

    def _ask_on(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        while not self._enough.is_set():
            asked = self._ask(connection)
            self.asked.append(asked)
            if asked.ending is Ending.UNREACHED:
                return
            if asked.ending is not Ending.ANSWERED:
                connection.close()
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> Asked:
        began = time.time()
        try:
            if connection.sock is None:
                connection.connect()
        except OSError as error:
            return Asked(Ending.UNREACHED, began, time.time(), repr(error))
        ending, said = self._exchange(connection)
        return Asked(ending, began, time.time(), said)

    def _exchange(self, connection: http.client.HTTPConnection) -> tuple[Ending, str]:
        # A refusal may have come before the body was sent.
        with contextlib.suppress(ConnectionError):
            connection.request("POST", "/v1/layer_norm", self._body, _HEADERS)
        try:
            response = connection.getresponse()
            content = response.read()
        except ConnectionError as error:
            # Among them `RemoteDisconnected`, which is raised only where nothing came at all.
            return Ending.CLOSED, repr(error)
        except (http.client.HTTPException, OSError) as error:
            return Ending.BROKEN, repr(error)
        return self._judge(response, content)

    def _judge(self, response: http.client.HTTPResponse, content: bytes) -> tuple[Ending, str]:
        if response.status == http.HTTPStatus.OK:
            worst = np.abs(from_npy(content) - self._expected).max()
            return (Ending.ANSWERED, "") if worst < 1e-5 else (Ending.BROKEN, f"an error of {worst}")
        said = f"{response.status} {content[:500]!r}"
        may_come_back = response.status in (429, 503) and response.headers["retry-after"] is not None
        if may_come_back and json.loads(content)["code"] in ("draining", "overloaded"):
            return Ending.REFUSED, said
        return Ending.BROKEN, said
