"""The machine on which a row was measured."""

import os
import platform
import subprocess
from pathlib import Path

import torch

COLUMNS = ("machine", "kernel", "torch", "commit")


def parse_cores(text: str) -> set[int]:
    """Parse cores in the format of `taskset`: 0, 0-7 or 0,2-3."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def list_own_cores() -> set[int]:
    """All cores that this process may use."""
    return os.sched_getaffinity(0)


def describe_machine() -> dict[str, object]:
    """The first columns of every CSV."""
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "machine": f"{_find_processor_name()}, {os.cpu_count()} cores{device}",
        "kernel": platform.release(),
        "torch": torch.__version__,
        "commit": said.stdout.strip(),
    }


def _find_processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
