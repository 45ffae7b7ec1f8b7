"""Processes of a fleet, forked from their supervisor, which has imported what they need.

Each is otherwise as `asyncio.create_subprocess_exec` would start it: with descriptors, environment, session, signal
handlers and log of its own, and nothing of its parent's event loop.
"""

import asyncio
import json
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

_GATEWAY = "normserve.process.gateway_process"
GATEWAY_NAME = "gateway_process"
"""Of the process that is forked: its command line is that of its server."""
_create_subprocess = asyncio.create_subprocess_exec


class ForkedWorker:
    """Used as `asyncio.subprocess.Process` is."""

    def __init__(self, pid: int, stdin: BinaryIO) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class SpareGateway(NamedTuple):
    """A process that becomes a gateway once it has an environment, and the ends of pipes to it."""

    pid: int
    environment: int
    stdin: int


_spare_gateways: list[SpareGateway] = []


def fork_spare_gateway() -> None:
    """Fork the process of the gateway that this one will start, as long as this one has no threads."""
    (environment, to_environment), (stdin, to_stdin) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(to_environment)
        os.close(to_stdin)
        with os.fdopen(environment) as told:
            given = told.read()
        # Its server may have ended without one.
        if not given:
            os._exit(0)
        Path("/proc/self/comm").write_text(GATEWAY_NAME, encoding="ascii")
        _become((_GATEWAY,), stdin, (), json.loads(given))
    os.close(environment)
    os.close(stdin)
    _spare_gateways.append(SpareGateway(pid, to_environment, to_stdin))


async def fork_worker(
    *command: str, stdin: int, env: Mapping[str, str], start_new_session: bool, pass_fds: Sequence[int] = ()
) -> ForkedWorker | asyncio.subprocess.Process:
    """In place of `asyncio.create_subprocess_exec`, for `python -m MODULE ARGUMENTS`."""
    assert command[:2] == (sys.executable, "-m")
    assert (stdin, start_new_session) == (asyncio.subprocess.PIPE, True)
    if command[2] == _GATEWAY:
        # A server that starts it has threads, which may hold locks at any moment.
        if not _spare_gateways:
            return await _create_subprocess(*command, stdin=stdin, env=env, start_new_session=True)
        spare = _spare_gateways.pop()
        with os.fdopen(spare.environment, "w") as environment:
            json.dump(dict(env), environment)
        return ForkedWorker(spare.pid, os.fdopen(spare.stdin, "wb", buffering=0))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(command[2:], reader, pass_fds, env)
    os.close(reader)
    return ForkedWorker(pid, os.fdopen(writer, "wb"))


def _become(command: Sequence[str], stdin: int, kept: Sequence[int], env: Mapping[str, str]) -> NoReturn:
    code: object = 1
    try:
        os.setsid()
        _leave_the_loop()
        logging.getLogger().handlers.clear()
        sys.stdin.close()
        os.dup2(stdin, 0)
        sys.stdin = os.fdopen(0, closefd=False)
        _close_others({0, 1, 2, *kept})
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(command)
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _leave_the_loop() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)


def _close_others(kept: set[int]) -> None:
    first = 0
    for descriptor in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        # An empty range is taken for all that follow.
        if first < descriptor:
            os.closerange(first, descriptor)
        first = descriptor + 1
