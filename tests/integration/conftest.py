"""Every test here may use a real server process."""

import pytest

from tests.integration.harness.preloaded import forking
from tests.integration.harness.servers import (
    api,
    launched,
    server,
    settled,
    shared_stage,
    stage,
    stage_of,
    start_server,
    until,
)

__all__ = ["api", "launched", "server", "settled", "shared_stage", "stage", "stage_of", "start_server", "until"]


@pytest.fixture
def load_test_forks(monkeypatch):
    """The load test's processes are forked with all imports done; `make test-slow` spawns them once."""
    context = forking()
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
