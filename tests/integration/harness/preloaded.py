"""Processes forked from one that has imported torch, which is most of what the start of one costs.

A server is a process of its own that runs the command as `python -m normserve` would, with its own environment,
output and end.  Processes of its fleet are forked from it in turn.
"""

import asyncio
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from tests.integration.harness.forked_workers import fork_spare_gateway, fork_worker


def forking() -> ForkServerContext:
    """For `multiprocessing`, in place of one that spawns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.harness.preloading", __name__])
    return context


class PreloadedProcess:
    """A program in such a process, used as `subprocess.Popen` is; what it writes comes from `stdout`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            arguments: `-m` and a module, or a file, and what follows on Python's command line.
            environment: what to add to the environment of this process.
        """
        context = forking()
        reader, writer = context.Pipe(duplex=False)
        with reader, writer:
            # One that is left running is terminated with the tests.
            self._process = context.Process(target=_run, args=(writer, arguments, dict(environment)), daemon=True)
            self._process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may end at this moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(output: Connection, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    with output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
            stream.reconfigure(line_buffering=True)
    os.environ.update(environment)
    asyncio.create_subprocess_exec = fork_worker
    if "--grpc-port" in arguments:
        fork_spare_gateway()
    program, *rest = arguments
    if program == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")
