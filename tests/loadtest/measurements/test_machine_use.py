from normload.measurements import machine_use
from normload.measurements.machine_use import CpuTimes, read_available_cores_cpu_times


def stat(tmp_path, *lines):
    file = tmp_path / "stat"
    file.write_text("\n".join(("cpu  1000 0 0 1000 0 0 0 0 0 0", *lines, "intr 5 1 2", "")))
    return file


def test_times_are_of_the_cores_that_the_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_use.os, "sched_getaffinity", lambda _: {0, 2})
    lines = ("cpu0 10 1 2 30 4 5 6 7 99 99", "cpu1 900 0 0 0 0 0 0 0 0 0", "cpu2 1 0 0 9 0 0 0 0 0 0")
    assert read_available_cores_cpu_times(stat(tmp_path, *lines)) == CpuTimes(busy=32, total=75)


def test_a_share_is_of_the_time_between_two_readings():
    assert CpuTimes(130, 400).compute_busy_fraction(CpuTimes(100, 300)) == 0.3
    assert CpuTimes(100, 300).compute_busy_fraction(CpuTimes(100, 300)) == 0.0


def test_a_system_without_these_times_has_none(tmp_path):
    assert read_available_cores_cpu_times(tmp_path / "missing") is None
    assert read_available_cores_cpu_times(stat(tmp_path)) is None
    assert read_available_cores_cpu_times(stat(tmp_path, "cpu0 a b c d", "cpu1 x")) is None


def test_this_system_s_times_only_grow():
    before, after = read_available_cores_cpu_times(), read_available_cores_cpu_times()
    if before is not None:
        assert after.total >= before.total
        assert 0 <= after.compute_busy_fraction(before) <= 1
