"""The blocking client's calls that come again when their connection has ended meanwhile."""

from types import SimpleNamespace

from normserve.client.deadlines import Deadline
from normserve.client.local.blocking import LocalTransport


def test_a_call_is_not_repeated_on_a_connection_that_has_ended():
    # The next attempt connects anew in place of failing as the one before.
    transport = LocalTransport("/nowhere", None)
    recurring = SimpleNamespace(known={"key": object()})
    assert transport.repeat(SimpleNamespace(is_open=False), recurring, "key", Deadline(1)) is None
    assert transport.usable_link() is None
