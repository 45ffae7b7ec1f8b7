"""Two ways to time short calls: the host's part alone, and the wall time of a loop."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.harness.timing import TimeQuantiles, compute_quantiles, disable_garbage_collection, synchronize

CALLS = 300
"""Calls per sample."""

AT_ONCE = 50
"""Calls queued while the device is busy; their launches stay below the 1024 at which a launch blocks."""

ROUNDS = 5
"""Samples of each call."""

_LEAST_BUSY_S = 0.002


class BusyDevice(Protocol):
    """The device that is kept busy."""

    def synchronize(self) -> None:
        """Wait until it is idle."""

    def queue_busy_work(self, seconds: float) -> None:
        """Queue work for it that takes `seconds`."""


class CudaDevice:
    """The current CUDA device."""

    def __init__(self, cycles: int = 20_000_000) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
        self._cycles_per_second = cycles / (start.elapsed_time(end) / 1e3)

    def synchronize(self) -> None:
        synchronize()

    def queue_busy_work(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second))


def time_queued_calls(call: Callable[[], object], device: BusyDevice) -> TimeQuantiles:
    """Milliseconds that the host takes for one call while the device has other work."""
    with disable_garbage_collection():
        seconds = _time_queue(call, device, 0.02)
        samples = []
        for _ in range(ROUNDS):
            groups = [_time_queue(call, device, _LEAST_BUSY_S + 1.5 * seconds) for _ in range(CALLS // AT_ONCE)]
            samples.append(sum(groups) / CALLS * 1e3)
    device.synchronize()
    return compute_quantiles(samples)


def _time_queue(call: Callable[[], object], device: BusyDevice, busy: float) -> float:
    """Seconds that `AT_ONCE` calls take the host."""
    device.synchronize()
    device.queue_busy_work(busy)
    began = time.perf_counter_ns()
    for _ in range(AT_ONCE):
        call()
    return (time.perf_counter_ns() - began) / 1e9


def time_call_loop(call: Callable[[], object], device: BusyDevice) -> TimeQuantiles:
    """Milliseconds of one call by the wall time of `CALLS` and one synchronisation."""
    samples = []
    with disable_garbage_collection():
        for _ in range(ROUNDS):
            device.synchronize()
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            device.synchronize()
            samples.append((time.perf_counter_ns() - began) / CALLS / 1e6)
    return compute_quantiles(samples)


WAYS: dict[str, Callable[[Callable[[], object], BusyDevice], TimeQuantiles]] = {
    "queued": time_queued_calls,
    "loop": time_call_loop,
}
"""Ways by the variant in the CSV."""
