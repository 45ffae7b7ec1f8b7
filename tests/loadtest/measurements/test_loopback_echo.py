import pytest
from normload.measurements.loopback_echo import LoopbackEcho, measure_echo, resolves_to_loopback


def test_the_echo_is_measured():
    echo = measure_echo(50_000, pairs=2, seconds=0.1)
    assert (echo.nbytes, echo.pairs) == (50_000, 2)
    assert echo.round_trips_per_second > 1
    assert 1e-6 < echo.p50_s < 5


def test_bytes_go_there_and_back():
    assert LoopbackEcho(1000, 2, 50.0, 0.1).bytes_per_second == 100_000


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("::1", True), ("192.0.2.1", False)])
def test_the_loopback_is_known(host, expected):
    assert resolves_to_loopback(host) is expected
