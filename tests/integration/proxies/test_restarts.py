"""A rolling restart behind a proxy, under load, fails nothing."""

import numpy as np
import pytest

from tests.integration.harness.load import Load
from tests.integration.harness.servers import find_free_port
from tests.integration.harness.wire import NPY, npy
from tests.integration.proxies.conftest import run_proxy

#: More than a proxy keeps of a request so that it may send it again.
BODY = npy(np.ones((256, 64), np.float32))
#: Longer than the health checks of the document take to notice.
DELAY = ("--drain-delay-s", "3")


def send_body(client, **headers):
    return client.post("/v1/layer_norm", content=BODY, headers={"Content-Type": NPY, **headers})


def send_body_alone(client):
    return send_body(client, Connection="close")


def is_whole(response):
    return len(response.content) == len(BODY)


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

    def count() -> int:
        return sum(kept.right) + sum(closed.right)

    with (
        run_proxy(proxy, tool, tmp_path, ports, change) as port,
        Load(f"http://127.0.0.1:{port}", send_body, is_whole, 2) as kept,
        Load(f"http://127.0.0.1:{port}", send_body_alone, is_whole, 2) as closed,
    ):
        for index, server in enumerate(servers):
            # The other one is known to be well before one goes.
            done = count()
            until(lambda done=done: count() > done + 400)
            server.terminate()
            assert server.wait(120) == 0
            start(ports[index])
        done = count()
        until(lambda: count() > done + 100)
    for load in (kept, closed):
        assert (load.wrong, sum(load.broken), sum(load.not_ready)) == ([], 0, 0)
    assert all("retiring: " in server.log for server in servers)
