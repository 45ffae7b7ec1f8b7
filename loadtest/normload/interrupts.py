"""Ctrl-C on a terminal, which reaches all processes there and is handled by the parent alone."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def block_interrupts_of_children() -> Iterator[None]:
    """Have the processes that are started in the `with` block never receive Ctrl-C, not even while they import.

    A process inherits the signals that the starting thread blocks.
    """
    # The first start of a process would start this one, and unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
