import httpx
import pytest
from normserve.client import Client, RetryPolicy


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
