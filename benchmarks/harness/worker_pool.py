"""Runs a task over many items in worker processes, some of which may die or hang."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

_POLL_SECONDS = 0.05


def count_workers() -> int:
    """All cores that this process may run on but two, which keep the machine responsive; at least one."""
    return max(1, len(os.sched_getaffinity(0)) - 2)


def run_in_workers(task: Callable[[Any], object], items: Sequence[Any], workers: int, seconds: float) -> int:
    """The number of `items` that workers have started when all are done or `seconds` have passed.

    An exception ends its item.  A permanent device error or a crash ends a worker, and another one replaces it.
    Workers still busy at the end are stopped.

    Args:
        task: importable by name.
        items: can be pickled.
    """
    context = multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    deadline = time.monotonic() + seconds
    running: list[BaseProcess] = []

    def start_worker() -> None:
        running.append(context.Process(target=_run_worker, args=(task, items, taken), daemon=True))
        running[-1].start()

    for _ in range(min(workers, len(items))):
        start_worker()
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        ended = [process for process in running if not process.is_alive()]
        running = [process for process in running if process.is_alive()]
        for process in ended:
            if process.exitcode and taken.value < len(items):
                start_worker()
    for process in running:
        process.kill()
        process.join()
    return min(int(taken.value), len(items))


def _run_worker(task: Callable[[Any], object], items: Sequence[Any], taken: Any) -> None:
    while True:
        with taken.get_lock():
            index = taken.value
            taken.value += 1
        if index >= len(items):
            return
        try:
            task(items[index])
        except Exception as error:
            print(f"{items[index]}: {str(error)[:200]}", file=sys.stderr)
            if "CUDA error" in str(error):  # permanent for the process
                raise SystemExit(1) from None
