"""Clients that check every answer, and clients that misbehave."""

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tests.integration.harness.raw import Answer, Connection
from tests.integration.harness.wire import NPY, npy

Address = tuple[str, int]

#: What a client may try again: refused for now, timed out, or cut off with the process that served it.
RETRYABLE = frozenset({408, 429, 503, 504})
_LONGEST_S = 60.0
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class Post:
    """A request as it goes over the wire, and the answer's tensor."""

    request: bytes
    expected: np.ndarray

    def is_answered_by(self, body: bytes) -> bool:
        got = np.frombuffer(body, np.float32, offset=len(body) - self.expected.nbytes)
        return got.size == self.expected.size and bool(
            np.abs(got.reshape(self.expected.shape) - self.expected).max() <= _TOLERANCE
        )


def make_posts(random_state: np.random.Generator) -> list[tuple[float, Post]]:
    """The mixture, each with its weight: single rows mostly, some of 64 KiB, few of 4 MiB."""
    posts = []
    for weight, rows in ((0.9, 1), (0.09, 16), (0.01, 1024)):
        for _ in range(4):
            x = random_state.standard_normal((rows, 1024), np.float32)
            mean, variance = x.mean(-1, keepdims=True, dtype=np.float64), x.var(-1, keepdims=True, dtype=np.float64)
            expected = ((x - mean) / np.sqrt(variance + 1e-5)).astype(np.float32)
            body = npy(x)
            head = (
                f"POST /v1/layer_norm HTTP/1.1\r\nHost: localhost\r\nContent-Type: {NPY}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            posts.append((weight / 4, Post(head.encode() + body, expected)))
    return posts


@dataclass(slots=True)
class Tally:
    """What the clients met; `wrong` holds what nobody may meet."""

    right: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, outcome: str, seconds: float, *, is_wrong: bool) -> None:
        with self.lock:
            self.longest_s = max(self.longest_s, seconds)
            if is_wrong:
                self.wrong.append(outcome)
            elif outcome == "right":
                self.right += 1
            else:
                self.retried[outcome] += 1

    @property
    def requests(self) -> int:
        return self.right + sum(self.retried.values()) + len(self.wrong)


class Client(threading.Thread):
    """Posts one request after another on one connection, and on a new one where that broke."""

    def __init__(
        self, address: Address, posts: list[tuple[float, Post]], tally: Tally, stop: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._address, self._tally, self._stop_event = address, tally, stop
        self._weights, self._posts = zip(*posts, strict=True)
        self._random = random.Random(id(self))
        self._connection: Connection | None = None

    def run(self) -> None:
        while not self._stop_event.is_set():
            (post,) = self._random.choices(self._posts, self._weights)
            began = time.monotonic()
            outcome, is_wrong = self._post(post)
            seconds = time.monotonic() - began
            self._tally.note(outcome, seconds, is_wrong=is_wrong or seconds > _LONGEST_S)
            if outcome != "right":
                time.sleep(self._random.uniform(0.02, 0.1))
        self._leave()

    def _post(self, post: Post) -> tuple[str, bool]:
        try:
            if self._connection is None:
                self._connection = Connection(self._address, timeout_s=_LONGEST_S)
            self._connection.sendall(post.request)
            answer = self._connection.answer()
        except TimeoutError:
            self._leave()
            return "no answer", True
        except (OSError, AssertionError):
            # With its process: it was cut off, and may be sent again.
            self._leave()
            return "cut off", False
        if answer.headers.get("connection") == "close":
            self._leave()
        if answer.status_code == 200:
            right = post.is_answered_by(answer.content)
            return ("right", False) if right else ("a wrong tensor", True)
        return self._refused(answer)

    def _refused(self, answer: Answer) -> tuple[str, bool]:
        outcome = f"{answer.status_code} {answer.text[:200]}"
        return (str(answer.status_code), False) if answer.status_code in RETRYABLE else (outcome, True)

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Nuisance(threading.Thread):
    """Connections that stop in the middle, send slowly, never read, or close one side; nobody expects an answer."""

    def __init__(self, address: Address, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address, self._stop_event = address, stop
        self._random = random.Random(id(self))

    def run(self) -> None:
        ways = (self._stops, self._drips, self._never_reads, self._half_closes, self._says_nothing)
        while not self._stop_event.is_set():
            with contextlib.suppress(OSError):
                self._random.choice(ways)()
            self._stop_event.wait(self._random.uniform(0.05, 0.3))

    def _head(self, nbytes: int) -> bytes:
        return f"POST /v1/layer_norm HTTP/1.1\r\nHost: localhost\r\nContent-Length: {nbytes}\r\n\r\n".encode()

    def _stops(self) -> None:
        with Connection(self._address, 5) as connection:
            connection.sendall(self._head(2**24) + bytes(self._random.randrange(2**16)))

    def _drips(self) -> None:
        with Connection(self._address, 5) as connection:
            connection.sendall(self._head(2**20))
            for _ in range(20):
                connection.sendall(b"x")
                if self._stop_event.wait(0.2):
                    return

    def _never_reads(self) -> None:
        with Connection(self._address, 5) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
            self._stop_event.wait(2)

    def _half_closes(self) -> None:
        with Connection(self._address, 5) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            connection.everything()

    def _says_nothing(self) -> None:
        with Connection(self._address, 5):
            self._stop_event.wait(2)
