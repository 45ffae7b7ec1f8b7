"""Runs calls on a GPU, one after another: `python -m tests.sanitize.target CALLS --record FILE`.

It is what compute-sanitizer watches, or one of the processes that compile kernels before.
"""

import argparse
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from fusednorm.launch.execution import run_launches
from torch import Tensor

from benchmarks.fingerprints.cases import MetaTensors, plan_case
from tests.sanitize.calls import Call

_RESULTS = ("y", "residual_out", "y_scale", "dx", "dresidual", "dweight", "dbias", "dscale", "dshift", "dgate")
_VALUES = torch.rand(1 << 22, generator=torch.Generator().manual_seed(20)) + 0.5


@dataclass(slots=True)
class DeviceTensors(MetaTensors):
    """Tensors of one call on a device; those that it writes, and what precedes unaligned ones, are uninitialised.

    Values come from the host, so that no other kernel is watched.
    """

    device: str = "cuda"
    has_statistics: bool = False

    def allocate(self, role: str, count: int, dtype: torch.dtype) -> Tensor:
        memory = torch.empty(count, dtype=dtype, device=self.device)
        is_result = role in _RESULTS or (role in ("mean", "rstd") and not self.has_statistics)
        if not is_result:
            values = memory[int(self.unaligned) :]
            repeated = _VALUES.repeat(-(-values.numel() // _VALUES.numel()))
            values.copy_(repeated[: values.numel()].to(dtype))
        return memory


def run_calls(calls: Iterable[Call], device: str = "cuda", until: float = float("inf")) -> list[str]:
    """Run calls in order while `time.monotonic()` is below `until`; return the names of those that ran."""
    done = []
    for call in calls:
        if time.monotonic() >= until:
            break
        case = call.case
        tensors = DeviceTensors(case.unaligned, device=device, has_statistics=" backward " in case.name)
        launches = plan_case(case, tensors).launches
        run_launches(torch.empty(0, device=device).device, launches or (), tensors.memories)
        if device == "cuda":
            torch.cuda.synchronize()
        done.append(case.name)
    return done


def main() -> None:
    """Run the pickled calls, or every so many of them, for so long, and write the names of those that ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calls", type=Path)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    # Written by the process that started this one.
    calls: list[Call] = pickle.loads(options.calls.read_bytes())
    torch.zeros(1, device="cuda")
    until = time.monotonic() + options.seconds
    done = run_calls(calls[options.first :: options.every], until=until)
    options.record.write_text("".join(f"{name}\n" for name in done))


if __name__ == "__main__":
    main()
