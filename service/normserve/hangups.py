"""SIGHUP, which a server handles while it serves, and ignores before and afterwards: by default it ends a process.

An event loop's own handler is not enough: its removal restores the default action while the process still ends.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handle_hangups(on_hangup: Callable[[], object]) -> Iterator[None]:
    """Call `on_hangup` in the running event loop at each SIGHUP within the block, and restore afterwards what was
    done before; only the main thread may call this.
    """
    loop = asyncio.get_running_loop()
    before = signal.signal(signal.SIGHUP, lambda number, frame: loop.call_soon_threadsafe(on_hangup))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
