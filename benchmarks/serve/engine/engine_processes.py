"""Engines in separate processes, one per device, which run on command."""

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from normserve.settings import make_device_environment

from benchmarks.serve.engine.bare_engine import BareEngine

_START_S, _TURN_S = 180.0, 60.0


class EngineProcess:
    """One engine, controlled from another process."""

    def __init__(self, device: str, nbytes: int, in_flight: int) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._here, there = spawning.Pipe()
        backend = "torch" if device == "cpu" else "triton"
        self._process = spawning.Process(target=_run_process, args=(there, backend, nbytes, in_flight), daemon=True)
        with _change_environment(make_device_environment(device)):
            self._process.start()
        there.close()

    def wait_until_ready(self) -> None:
        """Raises: EOFError, TimeoutError: it has ended, or takes too long."""
        self._receive(_START_S)

    def start_turn(self, seconds: float) -> None:
        """Begin a turn."""
        self._here.send(seconds)

    def receive_rate(self) -> float:
        """The rate of the turn."""
        return float(self._receive(_TURN_S))

    def terminate(self) -> None:
        """End the process at once."""
        self._process.terminate()
        self._process.join()

    def _receive(self, patience_s: float) -> Any:
        if not self._here.poll(patience_s):
            raise TimeoutError(f"an engine said nothing for {patience_s:g} s")
        return self._here.recv()


@contextlib.contextmanager
def start_engines(devices: Sequence[str], nbytes: int, in_flight: int) -> Iterator[list[EngineProcess]]:
    """An engine for each device, with requests of one size, warmed up."""
    with contextlib.ExitStack() as stack:
        started = []
        for device in devices:
            started.append(EngineProcess(device, nbytes, in_flight))
            stack.callback(started[-1].terminate)
        for engine in started:
            engine.wait_until_ready()
        yield started


@contextlib.contextmanager
def _change_environment(changed: dict[str, str]) -> Iterator[None]:
    """Change this process's environment, for the processes that it starts."""
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_process(channel: Connection, backend: str, nbytes: int, in_flight: int) -> None:
    asyncio.run(_run_turns(channel, backend, nbytes, in_flight))


async def _run_turns(channel: Connection, backend: str, nbytes: int, in_flight: int) -> None:
    engine = BareEngine(backend)
    await engine.start()
    jobs = await engine.make_jobs(nbytes, in_flight)
    channel.send("ready")
    while True:
        # A blocking read: there is no other work between turns.
        seconds = channel.recv()
        channel.send((await engine.run_turn(jobs, seconds)).bytes_per_second)
