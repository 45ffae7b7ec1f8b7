"""`normserve` with a CPU backend that obeys a test: rows of certain lengths make it wait, fail or run dry.

It writes `ran ROWSxN` for each launch.  While it waits, it waits for the file that $GATE names: with $WAIT_AT_START
also before its device starts, with $WAIT_AT_LOAD before it takes a second layer's parameters.  With
$COMPUTE_AT_START its device never comes to the end of its start.
"""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import normserve.http.application_services
import torch
from normserve.backends.cpu.backend import CpuBackend
from normserve.cli.commands import main
from normserve.errors import DeviceFailureError

WAITS, FAILS, RUNS_DRY, HAS_A_BUG = 101, 102, 103, 104


class MisbehavingBackend(CpuBackend):
    def __init__(self, threads, slabs):
        super().__init__(threads, slabs)
        # What waits must not do so on the event loop.
        self.max_inline_bytes = 0
        self.loaded = 0

    def start(self):
        if os.environ.get("WAIT_AT_START"):
            wait_for_gate()
        if os.environ.get("COMPUTE_AT_START"):
            compute_forever()
        return super().start()

    def load_parameters(self, op, weight, bias):
        if self.loaded and os.environ.get("WAIT_AT_LOAD"):
            wait_for_gate()
        self.loaded += 1
        return super().load_parameters(op, weight, bias)

    def run(self, batch):
        cols = batch.jobs[0].x.shape[-1]
        if cols == WAITS:
            say("waiting")
            wait_for_gate()
        if cols == FAILS:
            raise DeviceFailureError("injected")
        if cols == RUNS_DRY:
            raise MemoryError("injected")
        if cols == HAS_A_BUG:
            raise RuntimeError("injected")
        say(f"ran {sum(job.rows for job in batch.jobs)}x{cols}")
        return super().run(batch)


def say(line: str) -> None:
    """Write a line at once, so that none of the log comes between."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def compute_forever() -> NoReturn:
    """Spend nearly all time in torch's own code."""
    x = torch.ones(2**24)
    say("computing")
    while True:
        x.sum()


def wait_for_gate() -> None:
    gate = Path(os.environ["GATE"])
    while not gate.exists():
        time.sleep(0.005)


if __name__ == "__main__":
    normserve.http.application_services.make_backend_by_name = lambda name, threads, slabs, sizes: (
        MisbehavingBackend(threads, slabs)
    )
    sys.exit(main())
