"""How busy the processes of a server keep the processors."""

import os
from collections.abc import Mapping
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """What each process, by its name, has taken so far."""
    seconds = {}
    for name, pid in pids.items():
        # After the program's name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        seconds[name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds
