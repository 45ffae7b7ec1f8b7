import multiprocessing

import pytest

from benchmarks.serve.engine.engine_processes import start_engines
from tests.integration.harness.preloaded import forking


@pytest.mark.parametrize("devices", [("cpu", "cpu")])
def test_engines_run_side_by_side(devices, monkeypatch):
    # Forked with all imports done.
    context = forking()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    with start_engines(devices, 2**20, 1) as started:
        for engine in started:
            engine.start_turn(0.01)
        assert all(engine.receive_rate() > 0 for engine in started)
