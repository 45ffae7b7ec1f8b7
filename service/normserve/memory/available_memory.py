"""The memory limits at which the system would kill a process: the host's and the container's."""

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class _CgroupFiles(NamedTuple):
    """The names of a control group's files in one version of control groups.

    Attributes:
        limit, usage: the files with the group's memory limit and usage, in bytes.
        inactive_file_key: the key in `memory.stat` of the cached files that can be dropped.
    """

    limit: str
    usage: str
    inactive_file_key: str


_VERSION_2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")
# Cached files of the group and its descendants, to which the group's limit applies.
_VERSION_1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def read_available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes that this process could allocate before the host or a control group runs out of memory.

    Args:
        proc: the mount point of procfs, with the host's memory and the control group of this process.
        cgroups: the mount point of control groups, of version 2, or of version 1 with a folder for each controller.
    """
    return min([_read_host_available_bytes(proc), *_list_cgroup_available_bytes(proc, cgroups)])


def _read_host_available_bytes(proc: Path) -> int:
    """Return the host's available memory by /proc/meminfo; its free memory if that cannot be read."""
    try:
        return _parse_amounts(proc / "meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _list_cgroup_available_bytes(proc: Path, cgroups: Path) -> list[int]:
    """Return the bytes left below each memory limit of this process's control group and its parents; none
    without limits.
    """
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number, controllers) == ("0", ""):
            root, files = cgroups, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = cgroups / controllers, _VERSION_1
        else:
            continue
        group = root / path.removeprefix("/")
        groups = [group, *group.parents]
        found += [_read_group_available_bytes(each, files) for each in groups[: groups.index(root) + 1]]
    return [available for available in found if available is not None]


def _read_group_available_bytes(group: Path, files: _CgroupFiles) -> int | None:
    """Return the bytes left below one control group's memory limit; None without a limit, or if it cannot be read.

    Cached files that can be dropped count as left.
    """
    try:
        limit = (group / files.limit).read_text(encoding="ascii").strip()
        # Version 1 has a number beyond every host's memory instead.
        if limit == "max":
            return None
        used_bytes = int((group / files.usage).read_text(encoding="ascii"))
        # Cached files are counted, and are dropped before a process is killed.
        droppable = _parse_amounts(group / "memory.stat").get(files.inactive_file_key, 0)
        return max(0, int(limit) - used_bytes + droppable)
    except (OSError, ValueError):
        return None


def _parse_amounts(file: Path) -> dict[str, int]:
    """Parse lines of a name and a number into a dictionary."""
    fields = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {each[0]: int(each[1]) for each in fields if len(each) > 1}
