"""A server whose device obeys a test, and clients in the background."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from tests.integration.harness.misbehaving_server import WAITS
from tests.integration.harness.wire import npy

SCRIPT = str(Path(__file__).with_name("misbehaving_server.py"))


class Stage:
    """A misbehaving server, its gate, and clients that post to it in the background."""

    def __init__(self, server, gate: Path, pool: ThreadPoolExecutor, until: Callable) -> None:
        self.server, self.gate, self._pool, self.until = server, gate, pool, until
        self.http = server.client()

    def post(self, cols: int, rows: int = 1, **params: object) -> httpx.Response:
        content = npy(np.ones((rows, cols), np.float32))
        return self.http.post("/v1/layer_norm", content=content, params=params)

    def post_later(self, cols: int, rows: int = 1, **params: object) -> "Future[httpx.Response]":
        return self.later(self.post, cols, rows, **params)

    def later(
        self, request: Callable[..., httpx.Response], *arguments: object, **options: object
    ) -> "Future[httpx.Response]":
        return self._pool.submit(request, *arguments, **options)

    def occupy_device(self) -> "Future[httpx.Response]":
        """A request that runs until the gate opens."""
        before = self.server.log.count("waiting")
        running = self.post_later(WAITS)
        self.until(lambda: self.server.log.count("waiting") > before)
        return running

    def wait_for_queue(self, length: int) -> None:
        self.until(lambda: f"normserve_queue_requests {length}.0" in self.http.get("/metrics").text)

    def open_gate(self) -> None:
        self.gate.touch()


@contextlib.contextmanager
def stage_on(make_server: Callable, gate: Path, until: Callable) -> Iterator[Stage]:
    with ThreadPoolExecutor(8) as pool:
        server = make_server(env={"GATE": str(gate)}, script=SCRIPT)
        stage = Stage(server, gate, pool, until)
        yield stage
        stage.open_gate()
    stage.http.close()
