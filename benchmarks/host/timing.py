"""Two ways to time short calls: the host's part alone, and the wall time of a loop."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.harness.timing import Quantiles, quantiles, synchronize, without_collection

CALLS = 300
"""Calls per sample."""

AT_ONCE = 50
"""Calls queued while the device is busy; their launches stay below the 1024 at which a launch blocks."""

ROUNDS = 5
"""Samples of each call."""

_LEAST_BUSY_S = 0.002


class Device(Protocol):
    """The device that is kept busy."""

    def synchronize(self) -> None:
        """Wait until it is idle."""

    def occupy(self, seconds: float) -> None:
        """Queue work for it that takes `seconds`."""


class Cuda:
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

    def occupy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second))


def queued(call: Callable[[], object], device: Device) -> Quantiles:
    """Milliseconds that the host takes for one call while the device has other work."""
    with without_collection():
        seconds = _queue(call, device, 0.02)
        samples = []
        for _ in range(ROUNDS):
            groups = [_queue(call, device, _LEAST_BUSY_S + 1.5 * seconds) for _ in range(CALLS // AT_ONCE)]
            samples.append(sum(groups) / CALLS * 1e3)
    device.synchronize()
    return quantiles(samples)


def _queue(call: Callable[[], object], device: Device, busy: float) -> float:
    """Seconds that `AT_ONCE` calls take the host."""
    device.synchronize()
    device.occupy(busy)
    began = time.perf_counter_ns()
    for _ in range(AT_ONCE):
        call()
    return (time.perf_counter_ns() - began) / 1e9


def loop(call: Callable[[], object], device: Device) -> Quantiles:
    """Milliseconds of one call by the wall time of `CALLS` and one synchronisation."""
    samples = []
    with without_collection():
        for _ in range(ROUNDS):
            device.synchronize()
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            device.synchronize()
            samples.append((time.perf_counter_ns() - began) / CALLS / 1e6)
    return quantiles(samples)


WAYS: dict[str, Callable[[Callable[[], object], Device], Quantiles]] = {"queued": queued, "loop": loop}
"""Ways by the variant in the CSV."""
