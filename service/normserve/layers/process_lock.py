"""A lock between all processes that use the same folder, held by one task of one process."""

import asyncio
import contextlib
import fcntl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

# About the duration of a change of the layers.
_POLL_S = 0.005


class ProcessLock:
    """A lock that one task of one process holds at a time, among several processes.  It consists of two locked
    files, `turn` and `lock`.

    The holder of the turn waits for the lock, and all other processes wait for the turn. With one file
    alone, a process whose own tasks queue for the lock would take it again each time before another
    process looks.  No thread ever waits here, so the holder finds every thread that it needs; the
    kernel unlocks the files of a process that ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task_lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def hold(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Wait for the lock, take it, and hold it during the block.

        Args:
            timeout_s: longest wait for it; None waits for as long as it takes.

        Raises:
            TimeoutError: others held it all the time.
            OSError: the files cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            async with asyncio.timeout(timeout_s):
                await self._task_lock.acquire()
                stack.callback(self._task_lock.release)
                with (self._folder / "turn").open("w") as turn:
                    await _poll_file_lock(turn)
                    lock = stack.enter_context((self._folder / "lock").open("w"))
                    await _poll_file_lock(lock)
            yield


async def _poll_file_lock(file: IO[str]) -> None:
    """Lock a file exclusively; while another process has it locked, poll without blocking the event loop."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_POLL_S)
        else:
            return
