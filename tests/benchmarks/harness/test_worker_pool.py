"""Tasks come from the standard library: a worker imports them by name."""

import os
import time

import pytest

from benchmarks.harness.worker_pool import count_workers, run_in_workers


def test_every_item_is_done_though_some_raise(tmp_path, capfd):
    items = [str(tmp_path / name) for name in ("a", "a", "b/missing/parent", "c", "d")]
    assert run_in_workers(os.mkdir, items, workers=2, seconds=60) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d"]
    assert "missing/parent" in capfd.readouterr().err


def test_a_worker_that_dies_is_replaced(tmp_path):
    """The first command kills the shell's parent, which is the worker."""
    items = ["kill -9 $PPID", f"touch {tmp_path}/done"]
    assert run_in_workers(os.system, items, workers=1, seconds=60) == 2
    assert (tmp_path / "done").exists()


def test_a_worker_that_hangs_ends_with_the_time():
    began = time.monotonic()
    assert run_in_workers(time.sleep, [600], workers=1, seconds=2) <= 1
    assert time.monotonic() - began < 60


def test_nothing_to_do():
    assert run_in_workers(pytest.fail, [], workers=2, seconds=60) == 0


@pytest.mark.parametrize(("cores", "workers"), [({5}, 1), ({4, 5}, 1), (set(range(16)), 14)])
def test_workers_are_as_many_as_cores_of_the_process_less_two(
    cores: set[int], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    assert count_workers() == workers
