"""Chaos of clients that share memory: they compute, check every answer, leave at any moment and are killed.

`python -m tests.chaos.local --calls 1000000 --connects 10000` ends with 0 if no answer was wrong, no client that
lived lost one, and the server holds no connection, descriptor, thread or shared memory more than before, nor more
memory.
"""

import argparse
import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
from normserve.client import Client, RequestTimeoutError, RetryPolicy
from normserve.codec import local_messages as frames

from tests.integration.harness.local_wire import LocalConnection, request
from tests.integration.harness.servers import ServerProcess, launch_server

_CLIENTS, _CONNECTING = 8, 4
_ONCE = RetryPolicy(tries=1)
_MOST_GROWTH = 0.02
_SETTLE_S = 30.0
_TOLERANCE = 3e-5
# Threads of the server's pools that may have started since, at most.
_POOLED = (os.cpu_count() or 1) + 4
# Rows of 256, and how often.
_ROWS, _WEIGHTS = (1, 16, 256), (0.9, 0.09, 0.01)
_SAMPLE_S = 1.0


@dataclass(slots=True)
class Held:
    """What a server holds for its clients; after all of them are gone it is no more than before.

    Less it may be: what clients before them held is released in its own time.  Its threads are those of pools,
    which grow to a bound as they are needed.
    """

    connections: float
    bytes: float
    requests: float
    descriptors: int
    threads: int

    def exceeds(self, before: "Held") -> bool:
        bounds = replace(before, threads=before.threads + _POOLED)
        return any(now > most for now, most in zip(astuple(self), astuple(bounds), strict=True))


@dataclass(slots=True)
class Outcome:
    """Of one run.

    Attributes:
        calls: answers that were right.
        killed: clients.
        faults: what must not be.
        resident: of the server, its own memory in MiB, a sample a second.
    """

    calls: int = 0
    killed: int = 0
    faults: list[str] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of the median of the last quarter over that of the second: the first is the server's warming up."""
        quarter = max(1, len(self.resident) // 4)
        second = self.resident[quarter : 2 * quarter] or self.resident
        return statistics.median(self.resident[-quarter:]) / statistics.median(second) - 1


def held(server: ServerProcess) -> Held:
    """What the server holds now."""
    with server.client() as client:
        text = client.get("/metrics").text
    names = ("local_connections", "local_bytes", "inflight_requests")
    gauges = [float(re.search(rf"^normserve_{name} (\S+)", text, re.M)[1]) for name in names]
    descriptors = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    return Held(*gauges, descriptors=descriptors, threads=_status(server, "Threads"))


def _status(server: ServerProcess, name: str) -> int:
    text = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return int(re.search(rf"^{name}:\s+(\d+)", text, re.M)[1])


def _settled(server: ServerProcess, before: Held) -> list[str]:
    end = time.monotonic() + _SETTLE_S
    while (now := held(server)).exceeds(before):
        if time.monotonic() > end:
            return [f"left inside: {now}, before: {before}"]
        time.sleep(0.1)
    return []


def come_and_go(server: ServerProcess, path: Path, connects: int) -> Outcome:
    """Connections that say nothing, that greet, and that compute, several at a time."""
    outcome, before = Outcome(), held(server)
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)

    def connect(count: int) -> None:
        for number in range(count):
            try:
                with LocalConnection(path, greet=number % 3 > 0) as connection:
                    if number % 3 == 2:
                        assert connection.layer_norm(x).status == 200
            except (OSError, AssertionError) as error:
                outcome.faults.append(f"a connection: {error!r}")

    threads = [threading.Thread(target=connect, args=(connects // _CONNECTING,)) for _ in range(_CONNECTING)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        outcome.resident.append(_status(server, "RssAnon") / 1024)
        threads[0].join(_SAMPLE_S)
        for thread in threads[1:]:
            thread.join(0)
    outcome.faults += _settled(server, before)
    return outcome


def leave_early(server: ServerProcess, path: Path, visits: int) -> Outcome:
    """Clients of a living process that leave answers unread, that time out, and whose calls change size."""
    outcome, before = Outcome(), held(server)

    def visit(count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        with Client(f"unix://{path}", retries=_ONCE, timeout_s=_SETTLE_S) as lasting:
            for number in range(count):
                try:
                    if number % 3 == 0:
                        _close_with_answers_unread(path, random)
                    elif number % 3 == 1:
                        _time_out(path, random)
                    else:
                        _call_of_any_size(lasting, random)
                        outcome.calls += 1
                except Exception as error:
                    outcome.faults.append(f"a visit of kind {number % 3}: {error!r}")

    threads = [threading.Thread(target=visit, args=(visits // _CONNECTING, seed)) for seed in range(_CONNECTING)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        outcome.resident.append(_status(server, "RssAnon") / 1024)
        for thread in threads:
            thread.join(_SAMPLE_S / _CONNECTING)
    gc.collect()
    outcome.faults += _settled(server, before)
    return outcome


def _close_with_answers_unread(path: Path, random: np.random.Generator) -> None:
    with LocalConnection(path, greet=False) as connection:
        for message in (
            frames.HelloMessage(frames.VERSION),
            frames.GrowArenaMessage(int(random.integers(2**24))),
            request((2, 12)),
        ):
            connection.send(message)
            if random.random() < 0.5:
                time.sleep(0.01 * random.random())
        connection.send(frames.FreeSegmentMessage(0))


def _time_out(path: Path, random: np.random.Generator) -> None:
    x = np.ones((int(2 ** random.uniform(0, 10)), 256), np.float32)
    with (
        contextlib.suppress(RequestTimeoutError),
        Client(f"unix://{path}", retries=_ONCE, timeout_s=0.01 * random.random()) as client,
    ):
        client.layer_norm(x)


def _call_of_any_size(client: Client, random: np.random.Generator) -> None:
    # Not of ever new sizes, because the server remembers requests.
    x = np.ones((1 << int(random.integers(15)), 256), np.float32)
    bias = random.standard_normal(256, np.float32)
    if not (client.layer_norm(x, bias=bias).y == bias).all():
        raise AssertionError(f"a wrong answer to {len(x)} rows")


def churn(server: ServerProcess, path: Path, calls: int, *, every_s: float, clients: int = _CLIENTS) -> Outcome:
    """So many calls by several processes, one of which is killed each time, and another takes its place."""
    outcome, before = Outcome(), held(server)
    # Clients take long to start otherwise, beside the second that they have.
    context = multiprocessing.get_context("fork")
    counts, stop = RawArray(ctypes.c_uint64, clients), RawArray(ctypes.c_bool, 1)

    def start(slot: int, seed: int) -> BaseProcess:
        process = context.Process(target=_compute, args=(str(path), seed, counts, slot, stop))
        process.start()
        return process

    running = [start(slot, slot) for slot in range(clients)]
    began = time.monotonic()
    sampled = 0.0
    try:
        while sum(counts) < calls and not outcome.faults:
            time.sleep(every_s)
            slot = outcome.killed % clients
            outcome.faults += _failed(running)
            running[slot].kill()
            running[slot].join()
            outcome.killed += 1
            running[slot] = start(slot, clients + outcome.killed)
            if time.monotonic() - sampled >= _SAMPLE_S:
                sampled = time.monotonic()
                outcome.resident.append(_status(server, "RssAnon") / 1024)
                _say(sum(counts), outcome, sampled - began)
    finally:
        stop[0] = True
        for process in running:
            process.join(_SETTLE_S)
            if process.is_alive():
                outcome.faults.append("a client did not come to its end")
                process.kill()
                process.join()
    outcome.faults += _failed(running)
    outcome.calls = sum(counts)
    outcome.faults += _settled(server, before)
    return outcome


def _failed(running: list[BaseProcess]) -> list[str]:
    return [f"a client ended with {each.exitcode}" for each in running if each.exitcode not in (None, 0)]


def _say(calls: int, outcome: Outcome, seconds: float) -> None:
    if outcome.killed % 30 == 0:
        print(
            f"{seconds:6.0f} s  {calls} right, {outcome.killed} killed, {outcome.resident[-1]:.0f} MiB", flush=True
        )


def _compute(path: str, seed: int, counts: Any, slot: int, stop: Any) -> None:
    """A client: one call after another until told to stop; whatever is not the right answer ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    random = np.random.default_rng(seed)
    # One try: a refusal or a lost answer is a fault.
    with Client(f"unix://{path}", retries=RetryPolicy(tries=1), timeout_s=_SETTLE_S) as client:
        calls = [_call(client, random, rows) for rows in _ROWS]
        while not stop[0]:
            for index in random.choice(len(_ROWS), 100, p=_WEIGHTS):
                calls[index]()
                counts[slot] += 1


def _call(client: Client, random: np.random.Generator, rows: int) -> Callable[[], None]:
    elsewhere = random.standard_normal((rows, 256), np.float32)
    # Of its own in each client, so that another's answer is seen to be one.
    bias = random.standard_normal(256, np.float32)
    mean, variance = elsewhere.mean(-1, keepdims=True, dtype=np.float64), elsewhere.var(-1, keepdims=True)
    expected = ((elsewhere - mean) / np.sqrt(variance + 1e-5) + bias).astype(np.float32)
    there = client.empty(elsewhere.shape)
    there[:] = elsewhere

    def call() -> None:
        x = there if random.random() < 0.5 else elsewhere
        y = client.layer_norm(x, bias=bias).y
        if not np.abs(y - expected).max() <= _TOLERANCE:
            raise AssertionError(f"a wrong answer to {rows} rows, by up to {np.abs(y - expected).max()}")

    return call


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--connects", type=int, default=10_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "normserve.sock"
        server = launch_server(["--local", str(path)], {}, preloaded=False)
        try:
            server.wait_until_ready()
            # What the server makes once is there before anything is counted.
            faults = come_and_go(server, path, 100).faults
            parts = {
                f"{asked.connects} connections": lambda: come_and_go(server, path, asked.connects),
                f"{asked.connects} clients that leave early": lambda: leave_early(server, path, asked.connects),
                f"{asked.calls} calls": lambda: churn(server, path, asked.calls, every_s=1.0),
            }
            for name, run in parts.items():
                began = time.monotonic()
                outcome = run()
                print(
                    f"{name} in {time.monotonic() - began:.0f} s: {outcome.calls} right, {outcome.killed} clients"
                    f" killed, memory {outcome.growth:+.2%}, {outcome.resident[-1]:.0f} MiB",
                    flush=True,
                )
                if outcome.growth > _MOST_GROWTH:
                    outcome.faults.append(f"memory grew by {outcome.growth:.2%}")
                faults += outcome.faults
            faults += [line for line in server.lines if "Traceback" in line]
        finally:
            server.stop()
    for fault in faults:
        print(fault)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
