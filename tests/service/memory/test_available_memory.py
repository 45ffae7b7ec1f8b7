"""What may be taken is the least of what the host has and what each limit leaves."""

import pytest
from normserve.memory.available_memory import read_available_bytes

MIB = 2**20
HOST = 1000 * MIB


@pytest.fixture
def tree(tmp_path):
    """Folders as the kernel shows them, of a process in the group `/pod/server`."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {HOST // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/server\n")
    (tmp_path / "cgroups/pod/server").mkdir(parents=True)
    return tmp_path


def limited(tree, group, limit, taken, inactive_file=0):
    folder = tree / "cgroups" / group
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def available(tree):
    return read_available_bytes(tree / "proc", tree / "cgroups")


def test_without_a_limit_it_is_what_the_host_has(tree):
    assert available(tree) == HOST
    limited(tree, "pod/server", "max", 7 * MIB)
    assert available(tree) == HOST


def test_a_limit_leaves_what_is_not_taken_and_what_can_be_dropped(tree):
    limited(tree, "pod/server", 100 * MIB, 70 * MIB, inactive_file=10 * MIB)
    assert available(tree) == 40 * MIB


def test_a_host_with_less_than_the_limit_has_no_more(tree):
    limited(tree, "pod/server", 5000 * MIB, 0)
    assert available(tree) == HOST


def test_the_least_of_groups_within_one_another_counts(tree):
    limited(tree, "pod/server", 100 * MIB, 10 * MIB)
    limited(tree, "pod", 120 * MIB, 90 * MIB)
    assert available(tree) == 30 * MIB


def test_more_taken_than_the_limit_leaves_nothing(tree):
    limited(tree, "pod/server", 10 * MIB, 11 * MIB)
    assert available(tree) == 0


@pytest.mark.parametrize("path", ["/", "/../other", "/pod/server/gone"])
def test_a_container_finds_its_limit_where_its_groups_begin(tree, path):
    (tree / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n0::{path}\n")
    limited(tree, "", 50 * MIB, 20 * MIB)
    assert available(tree) == 30 * MIB


@pytest.mark.parametrize("name", ["memory.max", "memory.current", "memory.stat"])
def test_what_cannot_be_read_is_no_limit(tree, name):
    limited(tree, "pod/server", 50 * MIB, 20 * MIB)
    (tree / "cgroups/pod/server" / name).write_bytes(b"nonsense x")
    assert available(tree) == HOST


def test_where_there_are_no_groups_there_is_no_limit(tree):
    (tree / "proc/self/cgroup").unlink()
    assert available(tree) == HOST


@pytest.fixture
def old_tree(tree):
    """The same of version 1, as beside a version 2 that has no controllers."""
    (tree / "proc/self/cgroup").write_text("9:cpu,cpuacct:/other\n4:memory:/pod/server\n0::/elsewhere\n")
    (tree / "cgroups/memory/pod/server").mkdir(parents=True)
    return tree


def limited_in_version_1(tree, group, limit, taken, inactive_file=0):
    folder = tree / "cgroups/memory" / group
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {inactive_file}\n")


def test_limits_of_version_1_count_as_well(old_tree):
    limited_in_version_1(old_tree, "pod/server", 9223372036854771712, 90 * MIB)
    assert available(old_tree) == HOST
    limited_in_version_1(old_tree, "pod", 100 * MIB, 90 * MIB, inactive_file=5 * MIB)
    assert available(old_tree) == 15 * MIB
    limited_in_version_1(old_tree, "pod/server", 50 * MIB, 60 * MIB)
    assert available(old_tree) == 0


def test_a_container_finds_its_limit_of_version_1_where_its_groups_begin(old_tree):
    (old_tree / "proc/self/cgroup").write_text("4:memory:/docker/0123\n")
    limited_in_version_1(old_tree, "", 50 * MIB, 20 * MIB)
    assert available(old_tree) == 30 * MIB


@pytest.mark.parametrize("lines", ["", "nonsense\n", "0:\n4:memory\n::\n", "4:memory:/pod/server\n"])
def test_groups_that_say_nothing_are_no_limit(old_tree, lines):
    (old_tree / "proc/self/cgroup").write_text(lines)
    assert available(old_tree) == HOST
