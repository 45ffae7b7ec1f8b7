"""The load of the cores of the client's machine, by all of its processes and by those of the client."""

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Fields of a line of /proc/stat, after the core's name.
_IDLE, _IOWAIT, _STEAL_END = 3, 4, 8


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Accumulated CPU time of the cores that this process may use, in clock ticks.

    Attributes:
        busy, total: without idle time, and with it.
    """

    busy: int
    total: int

    def compute_busy_fraction(self, before: "CpuTimes") -> float:
        """Compute the fraction of the time since `before` that the cores were busy; 0 if no time has passed."""
        total = self.total - before.total
        return (self.busy - before.busy) / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PeakMachineUse:
    """The CPU use of the client's machine during the segment in which it was busiest.

    Attributes:
        cores: number of cores that the client may use.
        busy: the fraction of their time that all processes used, from 0 to 1.
        client: the fraction that the client's processes used.
    """

    cores: int
    busy: float
    client: float


def count_available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def read_available_cores_cpu_times(stat: Path = _STAT) -> CpuTimes | None:
    """Read the CPU time of the cores that this process may use, from Linux's /proc/stat; None if that fails."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy = total = 0
    try:
        for line in stat.read_text("ascii").splitlines():
            name, *fields = line.split()
            if name in names:
                # The last two fields, guest time, are contained in the first two.
                ticks = [int(field) for field in fields[:_STEAL_END]]
                total += sum(ticks)
                busy += sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]
    except (OSError, ValueError, IndexError):
        return None
    return CpuTimes(busy, total) if total else None
