"""Runs every algorithm under the tools of compute-sanitizer, on a GPU: `python -m tests.sanitize --seconds 60`.

First, processes without the sanitizer run all calls, which compiles their kernels into Triton's cache.  Then each
tool watches one process that runs the same calls for so many seconds, with a separate allocation for each tensor.
The status is 1 if a tool found an error, a call failed, or some algorithm did not run.
"""

import argparse
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.sanitize.calls import Call, calls

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_FOUND = 99
"""The exit status that a tool replaces the program's by if it found an error."""

_PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
_START_S = 120.0
"""The longest time in which a watched process starts, besides its calls."""


def main() -> int:
    """Compile, run each tool, print what ran; 1 if anything was found or left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the calls of each tool")
    parser.add_argument("--calls", type=int, default=400, help="the most calls")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), help="that compile kernels")
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"))
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer", path=_PLACES)
    if sanitizer is None:
        parser.error("compute-sanitizer must be on PATH; it comes with CUDA's toolkit")
    options.logs.mkdir(parents=True, exist_ok=True)
    chosen = calls(options.calls)
    path = options.logs / "calls.pickle"
    path.write_bytes(pickle.dumps(chosen))
    print(
        f"{len(chosen)} calls, {len(_combinations(chosen))} combinations of algorithm, pass and dtype", flush=True
    )
    if not _compile(path, options.processes, options.logs):
        return 1
    return max([_watch(sanitizer, tool, path, chosen, options.seconds, options.logs) for tool in options.tools])


def _compile(path: Path, processes: int, logs: Path) -> bool:
    """Run all calls in processes without the sanitizer; whether all of them ran."""
    start = time.monotonic()
    running = []
    for first in range(processes):
        command = [*_target(path, logs / f"compile-{first}.txt"), f"--every={processes}", f"--first={first}"]
        log = (logs / f"compile-{first}.log").open("w")
        running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    failed = [first for first, process in enumerate(running) if process.wait() != 0]
    for first in failed:
        print((logs / f"compile-{first}.log").read_text()[-3000:])
    print(f"compiled and run without a tool in {time.monotonic() - start:.0f} s", flush=True)
    return not failed


def _watch(sanitizer: str, tool: str, path: Path, chosen: list[Call], seconds: float, logs: Path) -> int:
    """Run calls under a tool for so long and print what ran; 1 if it found an error or a combination is missing."""
    record, log = logs / f"{tool}.txt", logs / f"{tool}.log"
    record.unlink(missing_ok=True)
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND), *_target(path, record)]
    start = time.monotonic()
    with log.open("w") as output:
        try:
            status = subprocess.run(
                [*command, f"--seconds={seconds}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                timeout=2 * seconds + _START_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    names = set(record.read_text().splitlines()) if record.exists() else set()
    ran = [call for call in chosen if call.case.name in names]
    missing = _combinations(chosen) - _combinations(ran)
    summaries = re.findall(r"SUMMARY: .*", log.read_text()) or ["no summary"]
    print(
        f"{tool}: {summaries[-1]}, status {status}; {len(ran)} of {len(chosen)} calls, "
        f"{len(_combinations(ran))} of {len(_combinations(chosen))} combinations, "
        f"in {time.monotonic() - start:.0f} s; see {log}",
        flush=True,
    )
    if status != 0:
        print(log.read_text()[:4000])
    return int(status != 0 or bool(missing))


def _combinations(of: list[Call]) -> set[tuple[object, str]]:
    return {each for call in of for each in call.combinations}


def _target(path: Path, record: Path) -> list[str]:
    return [sys.executable, "-m", "tests.sanitize.target", str(path), "--record", str(record)]


if __name__ == "__main__":
    sys.exit(main())
