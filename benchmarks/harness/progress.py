"""The progress of a run on stderr: lines, and on a terminal a bar below them."""

import sys
from types import TracebackType
from typing import Self


class ProgressDisplay:
    """Lines and a bar; a context manager.

    Args:
        total: number of steps.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def print_line(self, line: str) -> None:
        """Print a line that is not a step."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def finish_step(self, line: str) -> None:
        """Print the result of a finished step."""
        self._done += 1
        self.print_line(f"[{self._done}/{self._total}] {line}")
        if self._bar is not None:
            self._bar.advance(self._task)
