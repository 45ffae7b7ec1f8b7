"""A rolling restart behind a proxy, under load, fails nothing."""

import http.client
import threading
from collections import Counter

import numpy as np
import pytest

from tests.integration.harness.servers import find_free_port
from tests.integration.harness.wire import NPY, npy
from tests.integration.proxies.conftest import run_proxy

#: More than a proxy keeps of a request so that it may send it again.
BODY = npy(np.ones((256, 64), np.float32))
#: Longer than the health checks of the document take to notice.
DELAY = ("--drain-delay-s", "3")
CONNECTIONS = 4


class Load:
    """Clients that send requests one after another, and what became of these."""

    def __init__(self, port: int) -> None:
        self.outcomes: Counter[object] = Counter()
        self._port, self._has_ended = port, threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(index % 2 == 0,)) for index in range(CONNECTIONS)
        ]

    def __enter__(self) -> "Load":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for each in self._threads:
            each.join()

    def _send(self, keeps_connection: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._has_ended.wait(0.01):
            try:
                connection.request("POST", "/v1/layer_norm", BODY, {"Content-Type": NPY})
                response = connection.getresponse()
                self.outcomes[response.status, len(response.read()) == len(BODY)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.outcomes[repr(error)] += 1
                connection.close()
            if not keeps_connection:
                connection.close()
        connection.close()


def store_bodies(configuration: str) -> str:
    """nginx can send a request again only if it has its body."""
    assert configuration.count("proxy_request_buffering off;") == 1
    return configuration.replace("proxy_request_buffering off;", "proxy_request_buffering on;")


@pytest.mark.slow
@pytest.mark.parametrize(("proxy", "change"), [("haproxy", str), ("nginx", store_bodies)], ids=["haproxy", "nginx"])
def test_a_rolling_restart_fails_nothing(start_server, tool, tmp_path, until, proxy, change):
    ports = [find_free_port(), find_free_port()]

    def start(port: int):
        return start_server("--port", str(port), "--trusted-proxies", "127.0.0.1", "--allowed-hosts", "*", *DELAY)

    servers = [start(port) for port in ports]
    with run_proxy(proxy, tool, tmp_path, ports, change) as port, Load(port) as load:
        for index, server in enumerate(servers):
            # The other one is known to be well before one goes.
            done = sum(load.outcomes.values())
            until(lambda done=done: sum(load.outcomes.values()) > done + 400)
            server.terminate()
            assert server.wait(120) == 0
            start(ports[index])
        done = sum(load.outcomes.values())
        until(lambda: sum(load.outcomes.values()) > done + 100)
    assert load.outcomes.keys() == {(200, True)}
    assert all("retiring: " in server.log for server in servers)
