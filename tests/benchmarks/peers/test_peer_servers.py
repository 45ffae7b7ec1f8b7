from normload.adapters.registry import ADAPTERS

from benchmarks.peers.peer_servers import OTHERS


def test_every_server_speaks_something_known():
    assert {other.adapter for other in OTHERS.values()} <= ADAPTERS.keys()
