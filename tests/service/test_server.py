"""What holds for the whole process that serves."""

import sys

import pytest
from normserve import server
from normserve.settings import Settings


@pytest.fixture
def switch_interval():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_a_thread_that_compiles_gives_way_in_time(switch_interval, monkeypatch):
    told = []
    monkeypatch.setattr(server.Server, "run", lambda self: told.append(sys.getswitchinterval()))
    assert server.serve(Settings(port=0, backend="torch")) == 0
    assert told == [pytest.approx(0.0005)]
