import asyncio

import httpx
import pytest
from normserve.client import AsyncClient, Client, RetryPolicy

from .harness.raw_server import RawServer


@pytest.fixture
def connect():
    """A client of a fake server; it does not pause between attempts."""
    clients = []

    def make(server, tries=3, **options):
        client = Client(
            transport=httpx.MockTransport(server), retries=RetryPolicy(tries, first_pause_s=0), **options
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture(params=["blocking", "asynchronous"])
def ask(request):
    """Calls `use` with a client, blocking or not, of the server at a URL or behind a transport's handler."""

    def blocking(where, use, options):
        if callable(where):
            options["transport"] = httpx.MockTransport(where)
        else:
            options["url"] = where
        with Client(**options) as client:
            return use(client)

    async def asynchronous(where, use, options):
        if callable(where):
            options["transport"] = httpx.MockTransport(where)
        else:
            options["url"] = where
        async with AsyncClient(**options) as client:
            return await use(client)

    def make(where, use, tries=1, **options):
        options["retries"] = RetryPolicy(tries, first_pause_s=0)
        if request.param == "blocking":
            return blocking(where, use, options)
        return asyncio.run(asynchronous(where, use, options))

    return make


@pytest.fixture
def raw_server():
    """Starts a server that says on each connection what it is told to, once a request's head has come."""
    servers = []

    def start(*scripts, tls=None):
        servers.append(RawServer(scripts, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
