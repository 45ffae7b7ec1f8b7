import pytest

from benchmarks.serve.engine.processes import engines


@pytest.mark.parametrize("devices", [("cpu", "cpu")])
def test_engines_run_side_by_side(devices):
    with engines(devices, 2**20, 1) as started:
        for engine in started:
            engine.go(0.01)
        assert all(engine.bytes_per_second() > 0 for engine in started)
