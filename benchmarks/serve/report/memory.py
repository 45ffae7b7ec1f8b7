"""Memory of processes."""

import subprocess
from collections.abc import Sequence
from pathlib import Path


def read_resident_bytes(pids: Sequence[int]) -> int:
    """Host memory of all processes together; memory that several share counts once."""
    kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                kib += int(line.split()[1])
    return 1024 * kib


def read_device_bytes() -> int:
    """Used memory of the first GPU, by all processes."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(said.stdout) * 2**20
