"""Processor time of a server's processes."""

import os
from collections.abc import Mapping
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def read_processor_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """The processor seconds of each process so far, by name."""
    seconds = {}
    for name, pid in pids.items():
        # After the program's name, which may contain any characters.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        seconds[name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds
