"""Two versions of server and client in alternating turns.

usage: python -m benchmarks.serve.version_pairs --before CHECKOUT --out FILE.csv

CHECKOUT is a checkout of the older version (`git worktree add CHECKOUT COMMIT`); the newer one is what runs
this.  Each version has a server, one with front ends, and a client process of its own.  A turn is some calls of
one version, a pair is a turn of each, in alternating order.  Ratios are of before over after, so that more is
better: of the median time of a call, and of the CPU time that client and server spend on it, which other work
on the machine disturbs less.  The result is the median of the ratios within pairs, with its confidence interval
of 95 % for any distribution (order statistics).  With `--before .` the version is compared with itself.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients.checked_requests import COLS, make_parameters
from benchmarks.serve.servers import server_processes

CASES = {
    "raw http, 4 KiB": 2**12,
    "raw http, 1 MiB": 2**20,
    "raw http, 16 MiB": 2**24,
    "raw http, 64 MiB": 2**26,
    "raw front ends, 4 KiB": 2**12,
    "raw front ends, 1 MiB": 2**20,
    "raw v2, 4 KiB": 2**12,
    "raw v2, 1 MiB": 2**20,
    "http, 4 KiB": 2**12,
    "http, 1 MiB": 2**20,
    "unix, 4 KiB": 2**12,
    "unix, 1 MiB": 2**20,
    "unix, 16 MiB": 2**24,
    "unix host, 4 KiB": 2**12,
    "unix host, 1 MiB": 2**20,
    "unix host, 64 MiB": 2**26,
    "unix step": 2**12,
    "library, 4 KiB": 2**12,
    "library, 1 MiB": 2**20,
}
"""Bytes of x.  `raw` is a client of this benchmark, `library` fusednorm in the client's process, `unix host` shared
memory of the host whatever the backend.
"""
COLUMNS = ("case", "pair", "before_us", "after_us", "before_cpu_us", "after_cpu_us", "speed", "cpu_speed")
_SOURCES = ("kernels", "service", "loadtest")
_TURNS = Path(__file__).parent / "programs" / "version_client.py"
# Until a server answers such calls as it will answer all later ones.
_WARM_S = 0.5
_QUOTA = str(2**32)


@dataclass(frozen=True, slots=True)
class CallCost:
    """Seconds of a call: its median time, and its mean CPU time in client and servers."""

    time_s: float
    cpu_s: float


class VersionUnderTest:
    """One version's servers and its client process."""

    def __init__(self, client: subprocess.Popen[str], servers: list[int], device: str | None) -> None:
        self._client = client
        self._servers = servers
        self._device = device

    def run_turn(self, case: str, seconds: float) -> CallCost:
        """Let the client make calls for so many seconds."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        before = sum(map(read_session_cpu_s, self._servers))
        turn = {"case": case, "bytes": CASES[case], "device": self._device, "seconds": seconds}
        self._client.stdin.write(json.dumps(turn) + "\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"the client of {case} ended")
        result = json.loads(line)
        cpu_s = result["cpu_s"] + sum(map(read_session_cpu_s, self._servers)) - before
        return CallCost(result["median_s"], cpu_s / result["calls"])


def read_session_cpu_s(session: int) -> float:
    """The CPU seconds of all threads that run now in the processes of a session."""
    total_ns = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (process / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[3]) != session:
                continue
            for schedule in process.glob("task/*/schedstat"):
                with contextlib.suppress(OSError):
                    total_ns += int(schedule.read_text().split()[0])
    return total_ns / 1e9


def main() -> int:
    options = command.make_parser("the servers and of the clients")
    options.add_argument("--before", type=Path, required=True, help="a checkout of the older version")
    options.add_argument("--case", choices=CASES, action="append", help="all if not given")
    options.add_argument("--pairs", type=int, default=30)
    options.add_argument("--seconds", type=float, default=0.2, help="of each turn")
    options.add_argument("--backend", default="torch", help="of both; with triton, device memory over unix")
    return command.run_command(options.parse_args(), COLUMNS, measure)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each case and pair."""
    with contextlib.ExitStack() as stack:
        versions = {}
        for name, checkout in (("before", asked.before), ("after", Path())):
            own = folder / name
            own.mkdir()
            versions[name] = stack.enter_context(_start_version(checkout, own, asked))
        for case in asked.case or CASES:
            with results.run_part(case):
                _measure_case(results, versions, case, asked)


@contextlib.contextmanager
def _start_version(checkout: Path, folder: Path, asked: argparse.Namespace) -> Iterator[VersionUnderTest]:
    server_cores, client_cores = asked.cores
    environment = {"PYTHONPATH": ":".join(str((checkout / root).resolve()) for root in _SOURCES)}
    shared = folder / "local.sock"
    local = ("--local", str(shared), "--local-bytes", _QUOTA, "--local-device-bytes", _QUOTA)
    parameters = make_parameters()
    with contextlib.ExitStack() as stack:
        served = {}
        for name, options in (("http", local), ("frontends", ("--frontends", "1"))):
            own = folder / name
            own.mkdir()
            started = server_processes.run_normserve(
                server_cores, own, parameters, asked.backend, options, environment=environment
            )
            served[name], _ = stack.enter_context(started)
        urls = {name: f"http://127.0.0.1:{each.address}" for name, each in served.items()}
        command_line = [sys.executable, str(_TURNS), json.dumps(urls | {"unix": f"unix://{shared}"}), str(COLS)]
        client = stack.enter_context(
            server_processes.run_process(command_line, client_cores, environment, stdin=subprocess.PIPE)
        )
        device = "cuda" if asked.backend == "triton" else None
        yield VersionUnderTest(client, [each.pid for each in served.values()], device)


def _measure_case(
    results: CsvResults, versions: dict[str, VersionUnderTest], case: str, asked: argparse.Namespace
) -> None:
    for version in versions.values():
        version.run_turn(case, _WARM_S)
    speeds, cpu_speeds = [], []
    for number in range(asked.pairs):
        order = list(versions)[:: 1 if number % 2 else -1]
        turns = {name: versions[name].run_turn(case, asked.seconds) for name in order}
        before, after = turns["before"], turns["after"]
        speeds.append(before.time_s / after.time_s)
        cpu_speeds.append(before.cpu_s / after.cpu_s)
        results.add_row(
            {
                "case": case,
                "pair": number,
                "before_us": f"{1e6 * before.time_s:.4g}",
                "after_us": f"{1e6 * after.time_s:.4g}",
                "before_cpu_us": f"{1e6 * before.cpu_s:.4g}",
                "after_cpu_us": f"{1e6 * after.cpu_s:.4g}",
                "speed": f"{speeds[-1]:.4f}",
                "cpu_speed": f"{cpu_speeds[-1]:.4f}",
            }
        )
    print(f"{case}: {_format_summary(speeds)}; of CPU time {_format_summary(cpu_speeds)}", flush=True)


def _format_summary(ratios: list[float]) -> str:
    low, high = compute_median_interval(ratios)
    return f"speed {median(ratios):.3f} of before, {low:.3f} to {high:.3f}"


def compute_median_interval(values: list[float]) -> tuple[float, float]:
    """The sorted values between which the median of the distribution is with a confidence of at least 95 %.

    With too few values, the widest pair.
    """
    ordered, count = sorted(values), len(values)
    rank, below = 0, 1
    # The median is below the value of this rank with the probability of at most `rank` heads in `count` tosses.
    while rank < (count - 1) // 2 and 2 * (below + comb(count, rank + 1)) <= 0.05 * 2**count:
        rank += 1
        below += comb(count, rank)
    return ordered[rank], ordered[count - 1 - rank]


if __name__ == "__main__":
    sys.exit(main())
