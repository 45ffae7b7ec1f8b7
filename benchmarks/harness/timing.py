"""Timing of a call: device events around it, the L2 cache flushed before it, quantiles of many calls."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_LEVELS = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)


class TimeQuantiles(NamedTuple):
    """Milliseconds of one call."""

    p20: float
    p50: float
    p80: float


def compute_quantiles(times_ms: list[float]) -> TimeQuantiles:
    """Quantiles of the times of many calls, in milliseconds."""
    return TimeQuantiles(*torch.tensor(times_ms, dtype=torch.float64).quantile(_LEVELS).tolist())


def synchronize() -> None:
    """Wait for the current CUDA device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Disable garbage collection meanwhile."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class DeviceTimer:
    """Times calls on the current CUDA device.

    The flush writes several times the L2 cache's size; it also keeps the device busy while the host launches
    the next call, so that host time up to its length, some 300 us on an H200, does not show.
    """

    def __init__(self, flush_bytes: int = 1 << 30) -> None:
        self._flush = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")

    def __call__(
        self,
        call: Callable[[], object],
        repeats: int = 30,
        warmup: int = 3,
        before: Callable[[], object] | None = None,
    ) -> TimeQuantiles:
        """Quantiles of `repeats` calls after `warmup` others; `before` runs before each, outside its time."""
        for _ in range(warmup):
            if before is not None:
                before()
            call()
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        for start, end in zip(starts, ends, strict=True):
            if before is not None:
                before()
            self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return compute_quantiles([s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)])
