"""How one call is timed: device events around it, the L2 cache flushed before it, quantiles of many calls."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Quantiles(NamedTuple):
    """Milliseconds of one call."""

    p20: float
    p50: float
    p80: float


class Timer:
    """Times calls on the current CUDA device.

    The flush writes several times the L2 cache's size; it also keeps the device busy while the host launches
    the next call, so that host time up to its length does not show.
    """

    def __init__(self, flush_bytes: int = 256 << 20) -> None:
        self._flush = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")

    def __call__(self, call: Callable[[], object], repeats: int = 30, warmup: int = 3) -> Quantiles:
        """Quantiles of `repeats` calls after `warmup` more."""
        for _ in range(warmup):
            call()
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        for start, end in zip(starts, ends, strict=True):
            self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        times = torch.tensor([s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)])
        return Quantiles(*times.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist())
