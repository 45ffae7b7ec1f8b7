"""One harness under libFuzzer: `python -m tests.fuzz.target HARNESS [libFuzzer's own arguments]`.

Ends with a failure at an exception and at an input that takes more than 100 ms of processor time, three times over,
so that neither a garbage collection nor another process on the core counts.
"""

import sys
import time

import atheris

_MOST_SECONDS = 0.1

with atheris.instrument_imports(include=["normserve"]):
    from tests.fuzz.harnesses import HARNESSES


def _seconds(harness, data: bytes) -> float:
    began = time.thread_time()
    harness(data)
    return time.thread_time() - began


def main() -> None:
    name, *arguments = sys.argv[1:]
    harness = HARNESSES[name]
    slowest = 0.0

    def run(data: bytes) -> None:
        nonlocal slowest
        seconds = _seconds(harness, data)
        if seconds > _MOST_SECONDS:
            seconds = min(_seconds(harness, data) for _ in range(3))
            assert seconds <= _MOST_SECONDS, f"{len(data)} bytes took {seconds:.3f} s"
        if seconds > slowest:
            slowest = seconds
            print(f"slowest: {1e3 * seconds:.2f} ms for {len(data)} bytes", file=sys.stderr, flush=True)

    atheris.Setup([name, *arguments], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
