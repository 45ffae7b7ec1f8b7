"""Cooperative launches in Triton's interpreter, where programs that wait for one another take turns."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from triton.runtime.interpreter import interpreter_builder

_current: "CooperativeLaunch | None" = None


class CooperativeLaunch:
    """The programs of a launch, each in a thread of its own, of which one runs at a time.

    Args:
        run_program: what the interpreter calls once for each program, after it has set the program's number.
        count: the number of programs.
    """

    def __init__(self, run_program: Callable[..., None], count: int) -> None:
        self._run_program, self._count = run_program, count
        self._programs: list[_Program] = []
        self._progressed = False

    def add(self, **arguments: Any) -> None:
        """Add the program that the interpreter wants to run; the last one makes all of them run."""
        self._programs.append(_Program(self._run_program, arguments))
        if len(self._programs) == self._count:
            self._run()

    def pass_turn(self) -> None:
        """Let the other programs run, for the program that now runs."""
        self._running.pass_turn()

    def note_progress(self) -> None:
        """Note that a program may have posted what another one waits for."""
        self._progressed = True

    def _run(self) -> None:
        global _current
        _current = self
        try:
            unfinished = self._programs
            while unfinished:
                self._progressed = False
                for self._running in unfinished:
                    self._running.take_turn()
                left = [program for program in unfinished if not program.has_ended]
                if len(left) == len(unfinished) and not self._progressed:
                    raise RuntimeError(f"{len(left)} of {self._count} programs wait for values that none posts")
                unfinished = left
        finally:
            _current = None
            for program in self._programs:
                program.abandon()


class _AbandonedProgram(BaseException):
    """The end of a program that never gets what it waits for; no kernel's error, and not handled as one."""


class _Program:
    """One program of a launch."""

    def __init__(self, run_program: Callable[..., None], arguments: Mapping[str, Any]) -> None:
        self._run_program, self._arguments = run_program, arguments
        self._number = interpreter_builder.grid_idx
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: Exception | None = None
        self._is_abandoned = self.has_ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take_turn(self) -> None:
        """Run until the program ends or passes its turn; its error is raised here."""
        interpreter_builder.grid_idx = self._number
        self._may_run.release()
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error

    def pass_turn(self) -> None:
        """Wait for the next turn; called by the program's thread."""
        self._has_stopped.release()
        self._may_run.acquire()
        if self._is_abandoned:
            raise _AbandonedProgram

    def abandon(self) -> None:
        """End the thread, wherever the program waits."""
        self._is_abandoned = True
        self._may_run.release()
        self._thread.join()

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self._is_abandoned:
                self._run_program(**self._arguments)
        except _AbandonedProgram:
            pass
        except Exception as error:
            self._error = error
        finally:
            self.has_ended = True
            self._has_stopped.release()


def current_launch() -> CooperativeLaunch:
    """The launch whose program now runs.

    Raises:
        RuntimeError: it is not cooperative.
    """
    if _current is None:
        raise RuntimeError("programs exchange values only in a launch with launch_cooperative_grid=True")
    return _current
