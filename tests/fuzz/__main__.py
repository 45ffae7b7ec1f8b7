"""Coverage-guided fuzzing: `python -m tests.fuzz --seconds 600` runs every harness for so long, two at a time.

Inputs start from tests/fuzz/corpus.  One that fails is written to --artifacts and named; add it to the corpus with
its mend, and the tests keep it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.harnesses import HARNESSES

CORPUS = Path(__file__).with_name("corpus")
_AT_ONCE = 2
_LONGEST_INPUT = 8192


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one harness."""

    name: str
    failed: bool
    inputs: int
    slowest_ms: float
    log: str


def fuzz(name: str, seconds: int, inputs: int, artifacts: Path) -> Outcome:
    """Run one harness for so many seconds, or so many inputs (0: no limit) if they are through before."""
    with tempfile.TemporaryDirectory() as found:
        limits = [f"-max_total_time={seconds}", *([f"-runs={inputs}"] if inputs else [])]
        more = [f"-max_len={_LONGEST_INPUT}", f"-artifact_prefix={artifacts}/{name}-", "-print_final_stats=1"]
        process = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.target", name, *limits, *more, found, str(CORPUS / name)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    log = process.stdout + process.stderr
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", log)
    times = re.findall(r"slowest: ([\d.]+) ms", log)
    return Outcome(
        name,
        process.returncode != 0,
        int(counted[1]) if counted else 0,
        float(times[-1]) if times else 0.0,
        log,
    )


def main() -> int:
    """Fuzz; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of each harness")
    parser.add_argument("--inputs", type=int, default=0, help="of each harness at most; 0 is no limit")
    parser.add_argument("--harness", choices=list(HARNESSES), action="append", help="some of them, else all")
    parser.add_argument("--artifacts", type=Path, default=Path("fuzz-artifacts"))
    given = parser.parse_args()
    given.artifacts.mkdir(exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        names = given.harness or list(HARNESSES)
        outcomes = list(pool.map(lambda name: fuzz(name, given.seconds, given.inputs, given.artifacts), names))
    for each in outcomes:
        verdict = "FAILED" if each.failed else "passed"
        print(f"{each.name}: {verdict}, {each.inputs} inputs, the slowest took {each.slowest_ms:.1f} ms")
    for each in outcomes:
        if each.failed:
            print(f"\n{each.name}:\n{each.log[-4000:]}")
    return int(any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
