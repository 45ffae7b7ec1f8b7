"""How much memory may be taken before the system ends a process for it: the host's, and the container's limit."""

import os
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """What could be taken without taking it from anybody.

    Args:
        proc: where the kernel says what the host has, and the control group of this process.
        cgroups: where control groups of version 2 are mounted.
    """
    return min([_of_the_host(proc), *_of_the_groups(proc, cgroups)])


def _of_the_host(proc: Path) -> int:
    try:
        return _amounts(proc / "meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_the_groups(proc: Path, cgroups: Path) -> list[int]:
    """What is left below each limit of the groups that this process is in, one within another."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        path = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    except (OSError, StopIteration):
        return []
    group = cgroups / path
    groups = [group, *group.parents]
    return [left for each in groups[: groups.index(cgroups) + 1] if (left := _left_in(each)) is not None]


def _left_in(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        taken = int((group / "memory.current").read_text(encoding="ascii"))
        # Files that were read are counted, and are dropped before anybody is ended.
        droppable = _amounts(group / "memory.stat").get("inactive_file", 0)
        return max(0, int(limit) - taken + droppable)
    except (OSError, ValueError):
        return None


def _amounts(file: Path) -> dict[str, int]:
    """Numbers by the names before them."""
    fields = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {each[0]: int(each[1]) for each in fields if len(each) > 1}
