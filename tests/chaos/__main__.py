"""Chaos: a fleet under checked load while everything that can befall it does.

`python -m tests.chaos --minutes 30 --requests 1000000` ends with 0 if every request was answered right or with an
error that a client can retry, nothing was left inside, and memory did not grow by more than 2 % from the first
quarter to the last.  It runs until both the minutes and the requests are through.
"""

import argparse
import re
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from tests.chaos.disturbances import DISTURBANCES, Fleet
from tests.chaos.traffic import Client, Nuisance, Tally, make_posts
from tests.integration.harness.servers import launch_server

_CLIENTS, _NUISANCES = 12, 6
_MOST_GROWTH = 0.02
_SETTLE_S = 90.0
_LINES_BEFORE = 30
_LED_TO_ANOTHER = re.compile("During handling of the above exception|The above exception was the direct cause")
# None of these holds anything once nobody sends.
_EMPTY_AT_REST = ("inflight_requests", "inflight_bytes", "queue_requests", 'slab_bytes{state="used"}')


@dataclass(slots=True)
class Watch:
    """Memory and descriptors of the whole fleet, while nothing disturbs it."""

    fleet: Fleet
    resident: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self) -> None:
        try:
            statuses = [Path(f"/proc/{each}/status").read_text() for each in self.fleet.processes()]
            opened = [len(list(Path(f"/proc/{each}/fd").iterdir())) for each in self.fleet.processes()]
        except OSError:
            return
        self.resident.append(sum(int(re.search(r"VmRSS:\s+(\d+)", each)[1]) / 1024 for each in statuses))
        self.descriptors.append(sum(opened))

    @property
    def growth(self) -> float:
        """Of the median of the last quarter over that of the first."""
        quarter = max(1, len(self.resident) // 4)
        return statistics.median(self.resident[-quarter:]) / statistics.median(self.resident[:quarter]) - 1


def wait_until_ready(fleet: Fleet, count: int) -> None:
    """Every process serves."""
    end = time.monotonic() + _SETTLE_S
    while time.monotonic() < end:
        try:
            processes = httpx.get(f"{fleet.url}/v1/info", timeout=10).json().get("processes", [])
            if len(processes) == count and all(each["state"] == "ready" for each in processes):
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"not every process was ready again within {_SETTLE_S:g} s")


def left_inside(url: str) -> list[str]:
    """What the metrics say is still held though nobody sends any more."""
    end = time.monotonic() + _SETTLE_S
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
        held = [line for line in lines if line.startswith("normserve_") and is_held(line)]
        if not held or time.monotonic() > end:
            return held
        time.sleep(0.5)


def is_held(line: str) -> bool:
    """Whether a sample is of something that must be nothing at rest, and is not."""
    name, _, value = line.rpartition(" ")
    unlabelled = re.sub(r'process="\d+",?', "", name).replace("{}", "").removeprefix("normserve_")
    return unlabelled in _EMPTY_AT_REST and float(value) != 0


def errors_in(lines: list[str]) -> dict[str, list[str]]:
    """The tracebacks in the log by their last line, with the last place of ours that they name.

    Of exceptions that led to one another the last counts: logging that a process ends may itself lack memory.
    """
    found: dict[str, list[str]] = {}
    began = place = key = None
    for number, line in enumerate(lines):
        if _LED_TO_ANOTHER.search(line) and key is not None:
            found[key].pop()
            key = None
        elif "Traceback" in line:
            began, place, key = number, "outside of the server's modules", None
        elif began is not None and re.search(r'File ".*/normserve/', line):
            place = line.strip()
        elif began is not None and (error := re.match(r"\s*(\w+(?:Error|Exit)\b.*)", line)):
            # What led to a traceback stands before it.
            text = "\n".join(each.rstrip() for each in lines[max(0, began - _LINES_BEFORE) : number + 1])
            key = f"{error[1]} ({place})"
            found.setdefault(key, []).append(text)
            began = None
    return {error: texts for error, texts in found.items() if texts}


def is_want_of_memory(error: str) -> bool:
    """Whether it is what `limit_memory` brings about, anywhere; the loop of a process that ends of it is closed."""
    return bool(
        re.match(r"MemoryError|.*(can't allocate memory|Event loop is closed|can't start new thread)", error)
    )


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, default=0, help="at least so many")
    parser.add_argument("--devices", default="cpu,cpu")
    parser.add_argument("--seconds", type=float, default=6, help="that a disturbance lasts")
    parser.add_argument("--only", choices=DISTURBANCES, help="this disturbance and no other")
    given = parser.parse_args()
    # As users start it: workers are known by their command.
    server = launch_server(
        ["--devices", given.devices, "--max-layers", "100", "--hang-s", "10"], {}, preloaded=False
    )
    try:
        server.wait_until_ready()
        return disturb(server, given)
    finally:
        server.stop()


def disturb(server, given: argparse.Namespace) -> int:
    """Everything in turn until the time is over."""
    fleet = Fleet(server.process.pid, server.url)
    count = given.devices.count(",") + 1
    tally, stop, watch = Tally(), threading.Event(), Watch(fleet)
    posts = make_posts(np.random.default_rng())
    wait_until_ready(fleet, count)
    threads = [Client(server.address, posts, tally, stop) for _ in range(_CLIENTS)]
    threads += [Nuisance(server.address, stop) for _ in range(_NUISANCES)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    faults: list[str] = []
    while time.monotonic() - began < 60 * given.minutes or tally.requests < given.requests:
        for name in [given.only] if given.only else DISTURBANCES:
            try:
                DISTURBANCES[name](fleet, given.seconds)
            except AssertionError as error:
                faults.append(f"{name}: {error}")
            wait_until_ready(fleet, count)
            time.sleep(given.seconds / 2)
            watch.look()
            print(
                f"{time.monotonic() - began:6.0f} s  {name:20} {tally.right} right, {dict(tally.retried)},"
                f" {len(tally.wrong)} wrong, longest {tally.longest_s:.1f} s, {watch.resident[-1:]} MiB",
                flush=True,
            )
            if tally.wrong:
                break
        if tally.wrong:
            break
    seconds = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join(90)
    held = left_inside(fleet.url)
    server.terminate()
    code = server.wait(60)
    print(f"{tally.requests} requests in {seconds:.0f} s: {tally.right} right, to be retried {dict(tally.retried)}")
    print(f"memory {watch.growth:+.2%} from the first quarter to the last; descriptors {watch.descriptors[-4:]}")
    faults += [f"wrong: {each}" for each in tally.wrong[:10]] + [f"left inside: {each}" for each in held]
    faults += [f"ended with {code} after SIGTERM"] if code else []
    if given.minutes >= 5 and watch.growth > _MOST_GROWTH:
        faults.append(f"memory grew by {watch.growth:.2%}")
    logged = errors_in(server.lines)
    counts = {error: len(texts) for error, texts in logged.items()}
    for_memory = sum(count for error, count in counts.items() if is_want_of_memory(error))
    print(f"{sum(counts.values())} errors logged, {for_memory} for want of memory")
    faults += [
        f"logged {counts[error]} times: {error}\n{texts[0]}"
        for error, texts in logged.items()
        if not is_want_of_memory(error)
    ]
    for fault in faults:
        print(fault)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
