"""Two versions of the server in alternating turns: `python -m benchmarks.serve.pairs --before CHECKOUT --out FILE`.

CHECKOUT is a checkout of the older version (`git worktree add CHECKOUT COMMIT`); the newer one is what runs this.
Both servers have the same layer on the same core, the C client runs on another, and only one server receives
requests at a time.  A pair is a turn of each, in alternating order; the result is the median of the ratios within
pairs, with its confidence interval of 95 % for any distribution (order statistics).
"""

import argparse
import contextlib
import sys
from dataclasses import replace
from math import comb
from pathlib import Path
from statistics import median

from benchmarks.serve import command
from benchmarks.serve.clients.closed_loop import ClosedLoop
from benchmarks.serve.clients.posts import make_parameters, make_x, npy
from benchmarks.serve.report.results import Results
from benchmarks.serve.servers import launch
from benchmarks.serve.servers.launch import Served

#: Bytes of x and connections.
CASES = {
    "4 KiB": (2**12, 1),
    "4 KiB, 64 connections": (2**12, 64),
    "1 MiB": (2**20, 1),
    "16 MiB": (2**24, 1),
    "64 MiB": (2**26, 1),
}
COLUMNS = ("case", "pair", "before_per_second", "after_per_second", "after_over_before")
_NPY = "application/x-npy"
_SOURCES = ("kernels", "service", "loadtest")


def main() -> int:
    options = command.parser("pairs", "the servers and of the client")
    options.add_argument("--before", type=Path, required=True, help="a checkout of the older version")
    options.add_argument("--case", choices=CASES, action="append", help="all if not given")
    options.add_argument("--pairs", type=int, default=15)
    options.add_argument("--seconds", type=float, default=1.5, help="of each turn")
    options.add_argument("--backend", default="torch", help="of both: torch or triton")
    return command.run(options.parse_args(), COLUMNS, measure)


def measure(results: Results, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each case and pair."""
    server_cores, client_cores = asked.cores
    with contextlib.ExitStack() as stack:
        client = ClosedLoop(folder, client_cores)
        parameters = make_parameters()
        versions = []
        for version, source in (("before", asked.before), ("after", Path())):
            own = folder / version
            own.mkdir()
            path = ":".join(str((source / root).resolve()) for root in _SOURCES)
            over_tcp, _ = stack.enter_context(
                launch.normserve(server_cores, own, parameters, asked.backend, environment={"PYTHONPATH": path})
            )
            versions.append(replace(over_tcp, name=version))
        for case in asked.case or CASES:
            with results.part(case):
                _measure(results, client, versions, case, asked.pairs, asked.seconds)


def _measure(
    results: Results, client: ClosedLoop, versions: list[Served], case: str, pairs: int, seconds: float
) -> None:
    nbytes, connections = CASES[case]
    x = make_x(nbytes)
    body = npy(x)
    ratios = []
    for number in range(pairs):
        turns = versions if number % 2 else versions[::-1]
        rates = {each.name: client.turn(each, _NPY, body, seconds, connections).per_second for each in turns}
        ratios.append(rates["after"] / rates["before"])
        results.add(
            {
                "case": case,
                "pair": number,
                "before_per_second": f"{rates['before']:.2f}",
                "after_per_second": f"{rates['after']:.2f}",
                "after_over_before": f"{ratios[-1]:.4f}",
            }
        )
    low, high = interval(ratios)
    print(f"{case}: {median(ratios):.3f} of before, 95 % interval {low:.3f} to {high:.3f}", flush=True)


def interval(values: list[float]) -> tuple[float, float]:
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
