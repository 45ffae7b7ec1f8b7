"""Clients that ask without a pause while a test does something to the server."""

import threading
from collections.abc import Callable

import httpx


class Load:
    """Clients that ask on connections of their own until it is enough.

    Attributes, each with a number for every client:
        right: answers that are as they should be.
        not_ready: refusals for the moment.
        broken: connections that ended.

    Attributes:
        wrong: what all other answers say.
    """

    def __init__(
        self,
        url: str,
        ask: Callable[[httpx.Client], httpx.Response],
        is_right: Callable[[httpx.Response], bool],
        count: int = 4,
    ) -> None:
        """Args: is_right: of an answer whose status is 200."""
        self._url, self._ask, self._is_right = url, ask, is_right
        self._enough = threading.Event()
        self.wrong: list[str] = []
        self.right, self.broken, self.not_ready = [0] * count, [0] * count, [0] * count
        self._threads = [threading.Thread(target=self._go_on, args=(index,)) for index in range(count)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()

    def _go_on(self, index: int) -> None:
        while not self._enough.is_set():
            with httpx.Client(base_url=self._url, timeout=60, verify=False) as api:
                try:
                    while not self._enough.is_set():
                        self._judge(index, self._ask(api))
                except httpx.TransportError:
                    # The process that had the connection was killed.
                    self.broken[index] += 1

    def _judge(self, index: int, answer: httpx.Response) -> None:
        if answer.status_code == 503 and answer.json()["code"] == "not_ready":
            assert int(answer.headers["retry-after"]) >= 1
            self.not_ready[index] += 1
        elif answer.status_code == 200 and self._is_right(answer):
            self.right[index] += 1
        else:
            self.wrong.append(f"{answer.status_code} {answer.content[:200]!r}")
