"""Scenarios of stress for a server; each returns the measured numbers and their requirements."""

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.serve.clients.checked_requests import CheckedRequest
from benchmarks.serve.clients.raw_client import RawConnection
from benchmarks.serve.servers import server_metrics
from benchmarks.serve.servers.server_processes import ServerProcess

_REFUSED_WITHIN_S = 0.020
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StressMeasurement:
    """A number, and its requirement as text."""

    measure: str
    value: float
    wanted: str


@dataclass(slots=True)
class _ResponseTally:
    """Seconds of each response by its kind, and the number of broken connections."""

    served_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    other: int = 0
    broken: int = 0


async def run_overload(
    server: ServerProcess, post: CheckedRequest, seconds: float, at_once: int
) -> list[StressMeasurement]:
    """A closed loop for the server's capacity, then an open loop at three times that rate.

    Args:
        at_once: number of requests that the server admits, and of connections of the closed loop.
    """
    port = int(server.address)
    # The first part of each lets the number of slabs settle.
    await _run_closed_loop(port, post, seconds / 4, at_once, waits_for_leave=True)
    began = time.perf_counter()
    full = await _run_closed_loop(port, post, seconds, at_once, waits_for_leave=True)
    capacity = len(full.served_s) / (time.perf_counter() - began)
    await _run_open_loop(port, post, 3 * capacity, seconds / 4)
    before = _read_resident_bytes(server.pid)
    began = time.perf_counter()
    storm = await _run_open_loop(port, post, 3 * capacity, seconds)
    goodput = len(storm.served_s) / (time.perf_counter() - began)
    p99_s = _compute_quantile(full.served_s, 0.99)
    served_p99_s = _compute_quantile(storm.served_s, 0.99)
    refused_p99_s = _compute_quantile(storm.refused_s, 0.99)
    return [
        StressMeasurement(f"closed loop, {at_once} connections, requests/s", capacity, "-"),
        StressMeasurement("p99 there, s", p99_s, "-"),
        StressMeasurement("goodput at 3 times that rate over it", goodput / capacity, ">= 0.9"),
        StressMeasurement("p99 of what is served over that of the closed loop", served_p99_s / p99_s, "< 2"),
        StressMeasurement("p99 of a refusal, s", refused_p99_s, f"< {_REFUSED_WITHIN_S}"),
        StressMeasurement("refused", len(storm.refused_s), "-"),
        StressMeasurement("neither served nor refused", storm.other + storm.broken, "0"),
        StressMeasurement("growth of resident memory", _read_resident_bytes(server.pid) / before - 1, "<= 0.02"),
    ]


async def run_disturbance(
    server: ServerProcess, posts: list[CheckedRequest], count: int
) -> list[StressMeasurement]:
    """Clients of which half disconnect at a random moment: in the header, the body, the wait or the response."""
    port, rng = int(server.address), random.Random(0)
    for post in posts:
        await _send_on_new_connection(port, post)
    tally = _ResponseTally()
    queue = iter(range(count))

    async def run_client() -> None:
        for _ in queue:
            post = rng.choice(posts)
            if rng.random() < 0.5:
                await _send_disturbed(port, post, rng)
                continue
            try:
                answered = await _send_on_new_connection(port, post)
            except OSError:
                tally.broken += 1
                continue
            if answered == 200:
                tally.served_s.append(0.0)
            else:
                tally.other += 1

    await asyncio.gather(*(run_client() for _ in range(16)))
    left = await _wait_until_unused(port)
    return [
        StressMeasurement("answers that were awaited and right", len(tally.served_s), f"all of about {count // 2}"),
        StressMeasurement("awaited answers that were an error", tally.other, "0"),
        StressMeasurement("connections that broke", tally.broken, "0"),
        *(StressMeasurement(f"{name} afterwards", value, "0") for name, value in left.items()),
    ]


async def run_mixed_load(
    server: ServerProcess, posts: list[CheckedRequest], seconds: float
) -> list[StressMeasurement]:
    """A mixed closed loop on eight connections."""
    port, rng, answers = int(server.address), random.Random(0), 0
    end = time.monotonic() + seconds
    resident: list[int] = []

    async def run_client() -> None:
        nonlocal answers
        wire = await RawConnection.open(port)
        while time.monotonic() < end:
            assert (await rng.choice(posts).send(wire)).status == 200
            answers += 1
        wire.close()

    async def sample_memory() -> None:
        while time.monotonic() < end:
            # The first half lets the number of slabs settle.
            if time.monotonic() > end - seconds / 2:
                resident.append(_read_resident_bytes(server.pid))
            await asyncio.sleep(0.2)

    await asyncio.gather(sample_memory(), *(run_client() for _ in range(8)))
    return [
        StressMeasurement("answers", answers, "-"),
        StressMeasurement("resident memory, bytes", resident[-1], "-"),
        StressMeasurement("its spread in the second half", max(resident) / min(resident) - 1, "<= 0.02"),
    ]


async def run_single_rows(
    server: ServerProcess, post: CheckedRequest, seconds: float, wanted: str
) -> list[StressMeasurement]:
    """64 connections that each send requests of one row in a closed loop.

    Args:
        wanted: the requirement of the number of requests a launch.
    """
    port = int(server.address)
    await _run_closed_loop(port, post, seconds / 3, 64)
    before = await _fetch_samples(port)
    began = time.perf_counter()
    answers = len((await _run_closed_loop(port, post, seconds, 64)).served_s)
    rate = answers / (time.perf_counter() - began)
    after = await _fetch_samples(port)
    return [
        StressMeasurement("requests/s", rate, "-"),
        StressMeasurement("requests a launch", server_metrics.compute_requests_per_launch(before, after), wanted),
    ]


async def _run_closed_loop(
    port: int, post: CheckedRequest, seconds: float, connections: int, *, waits_for_leave: bool = False
) -> _ResponseTally:
    """Requests on each of `connections`, the next when the last has been answered."""
    began, tally = time.perf_counter(), _ResponseTally()

    async def run_client() -> None:
        wire = await RawConnection.open(port)
        while (sent := time.perf_counter()) - began < seconds:
            assert (await post.send(wire, waits_for_leave=waits_for_leave)).status == 200
            tally.served_s.append(time.perf_counter() - sent)
        wire.close()

    await asyncio.gather(*(run_client() for _ in range(connections)))
    return tally


async def _run_open_loop(port: int, post: CheckedRequest, rate: float, seconds: float) -> _ResponseTally:
    """Requests at a constant rate, independent of earlier responses, on as many connections as necessary; seconds
    are counted from when a request was due, so that a client that is late counts against the server.
    """
    tally = _ResponseTally()
    idle: list[RawConnection] = []

    async def send_one(due: float) -> None:
        try:
            wire = idle.pop() if idle else await RawConnection.open(port)
            answered = await post.send(wire, waits_for_leave=True)
        except OSError:
            tally.broken += 1
            return
        took = time.perf_counter() - due
        if answered.is_reusable:
            idle.append(wire)
        else:
            wire.close()
        if answered.status == 200:
            tally.served_s.append(took)
        elif answered.status == 429:
            tally.refused_s.append(took)
        else:
            tally.other += 1

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            due = start + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(send_one(due))
    for wire in idle:
        wire.close()
    return tally


async def _send_on_new_connection(port: int, post: CheckedRequest) -> int:
    wire = await RawConnection.open(port)
    try:
        return (await post.send(wire)).status
    finally:
        wire.close()


async def _send_disturbed(port: int, post: CheckedRequest, rng: random.Random) -> None:
    """One client that disconnects."""
    try:
        wire = await RawConnection.open(port)
    except OSError:
        return
    try:
        whole = post.head + b"\r\n" + post.body
        match rng.randrange(4):
            case 0:
                await wire.send_bytes(whole[: rng.randrange(len(post.head))])
            case 1:
                await wire.send_bytes(whole[: rng.randrange(len(post.head), len(whole))])
            case 2:
                await wire.send_bytes(whole)
                await asyncio.sleep(rng.random() * 0.005)
            case _:
                await wire.send_bytes(whole)
                await wire.receive_bytes(rng.randrange(1, len(post.body)))
    except OSError:
        return
    finally:
        wire.close()


async def _wait_until_unused(port: int) -> dict[str, float]:
    """Requests and memory in use in the server's metrics, once all are 0 or after ten seconds."""
    names = (
        "normserve_inflight_requests",
        "normserve_inflight_bytes",
        "normserve_queue_requests",
        'normserve_slab_bytes{state="used"}',
    )
    for _ in range(100):
        now = await _fetch_samples(port)
        left = {name: now[name] for name in names}
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


async def _fetch_samples(port: int) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    return server_metrics.parse_samples(text)


def _read_resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def _compute_quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
