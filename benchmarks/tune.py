"""Times every plausible launch configuration of a LayerNorm pass: what `fusednorm.launch`'s tables rest on.

    python -m benchmarks.tune --out tune.csv [--pass forward] [--dtype bfloat16] [--cols 4096,8192]

Each configuration must agree with the table's own choice before it is timed.
"""

import argparse
import csv
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
from fusednorm import launch, layer_norm_plan, traffic
from fusednorm.checks import Epilogue
from fusednorm.launch import (
    BackwardShared,
    BackwardSlab,
    BackwardTile,
    ForwardRow,
    ForwardShared,
    ForwardSweep,
    ForwardTile,
    Launch,
)
from fusednorm.results import Backward, Forward

from benchmarks.timing import Timer

COLS = (
    256,
    512,
    768,
    1024,
    2048,
    2560,
    3072,
    4096,
    5120,
    6144,
    8192,
    12288,
    14336,
    16384,
    32768,
    65536,
    131072,
)
X_BYTES = 256 << 20


def candidates(pass_: str, cols: int, itemsize: int) -> Iterator[launch.Forward | launch.Backward]:
    """Configurations that may suit rows of `cols` elements: bounded by registers and shared memory."""
    tensors = 1 if pass_ == "forward" else 2
    for (chunks, block), rows, warps, stages, per_sm in itertools.product(
        shapes(pass_, cols, itemsize), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 3, 4), (0, 1, 2, 3, 4, 6)
    ):
        slab = chunks * block
        held = rows * slab // (32 * warps)
        registers = tensors * 32 * warps * (held * 2 + 32) * max(per_sm, 1)
        shared = tensors * rows * slab * itemsize * (stages - 1) * max(per_sm, 1)
        if (stages == 1) != (per_sm == 0) or (stages == 1 and tensors == 2):
            continue
        if not 16 // tensors <= held <= 64 // tensors or (block < 8 * 32 and block < cols):
            continue
        if registers > 72_000 or shared > 220_000 or (stages > 1 and shared < 30_000):
            continue
        if pass_ == "forward":
            yield ForwardTile(rows, chunks, block, warps, stages, per_sm)
        else:
            yield BackwardTile(rows, block, warps, stages, per_sm, True)
    if pass_ == "forward":
        for block, warps in itertools.product((512, 1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16, 32)):
            if 8 <= block // (32 * warps) <= 32 and 2 * block <= cols:
                for ahead_per_sm in (0, 1, 2, 3, 4) if cols * itemsize > 16384 else (0,):
                    yield ForwardSweep(block, warps, ahead_per_sm)
        for chunks, warps in itertools.product(range(1, 9), (1, 2, 4, 8, 16, 32)):
            if cols <= chunks * 256 * warps < cols + 256 * warps:
                for per_sm in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24):
                    if 24 + 2.5 * chunks * itemsize <= 2048 / (warps * per_sm) <= 160:
                        yield ForwardRow(chunks, warps, per_sm)
        yield from shared_forward(cols, itemsize)
    elif cols > 8192:
        yield BackwardSlab(4096, 8, 1, 2048, 4, 4, 2)
        yield from shared_backward(cols, itemsize)


def shared_forward(cols: int, itemsize: int) -> Iterator[ForwardShared]:
    """Slabs of 2 to 64 KB; as many as the registers that their data needs allow."""
    for chunks, warps, lag in itertools.product((1, 2, 4), (4, 8, 16), (1, 2, 3)):
        block = 256 * warps
        if 8192 < cols and chunks * block < cols:
            for resident_warps, ahead in itertools.product((16, 20, 24, 28, 32), (1, 2)):
                registers = 2048 // resident_warps
                if resident_warps % warps == 0 and 40 + 5 * chunks * itemsize <= registers <= 128:
                    yield ForwardShared(chunks, warps, resident_warps // warps, lag, ahead)


def shared_backward(cols: int, itemsize: int) -> Iterator[BackwardShared]:
    """Slabs of 8 or 16 columns a thread; as many as the registers that their data needs allow."""
    for warps, per_thread, lag, ahead in itertools.product((4, 8), (8, 16), (1, 2, 3), (1, 2)):
        for resident_warps in (8, 12, 16, 20, 24):
            if resident_warps % warps == 0 and 2048 // resident_warps >= 20 + (4 + itemsize // 2) * per_thread:
                yield BackwardShared(32 * warps * per_thread, warps, resident_warps // warps, lag, ahead)


def shapes(pass_: str, cols: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(chunks, block) that hold a row with little waste."""
    if cols <= (65536 if pass_ == "forward" else 16384) // itemsize:
        choices = []
        for chunks in (1, 3, 5, 7) if pass_ == "forward" else (1,):
            block = 1 << (-(-cols // chunks) - 1).bit_length()
            choices.append((chunks * block, chunks, block))
        yield min(choices)[1:]


class Problem:
    """The tensors of one pass, and its plan under a configuration."""

    def __init__(self, pass_: str, cols: int, dtype: torch.dtype, device: str) -> None:
        self.pass_ = pass_
        rows = max(1, X_BYTES // dtype.itemsize // cols)
        fill = torch.empty if device == "meta" else torch.randn
        self.x, self.dy = (fill(rows, cols, device=device, dtype=dtype) for _ in range(2))
        self.weight, self.bias = (fill(cols, device=device, dtype=dtype) for _ in range(2))
        self.mean, self.rstd = torch.zeros(rows, device=device), torch.ones(rows, device=device)
        self.out = torch.empty_like(self.x)
        self.dweight, self.dbias = torch.empty_like(self.weight), torch.empty_like(self.bias)

    def plan(self, config: launch.Forward | launch.Backward | None) -> list[Launch]:
        if self.pass_ == "forward":
            assert config is None or isinstance(config, launch.Forward)
            return layer_norm_plan.plan_forward(
                self.x, self.weight, self.bias, 1e-5, None, Epilogue(), Forward(self.out), False, config
            )
        assert config is None or isinstance(config, launch.Backward)
        out = Backward(self.out, self.dweight, self.dbias)
        return layer_norm_plan.plan_backward(
            self.dy, self.x, self.weight, self.bias, 1e-5, self.mean, self.rstd, None, None, Epilogue(),
            out, False, config,
        )  # fmt: skip

    def min_bytes(self) -> int:
        size = self.x.element_size()
        if self.pass_ == "forward":
            return traffic.forward_bytes(self.x.numel(), size, size)
        return traffic.backward_bytes(self.x.numel(), size, size)


def compile_only(pass_: str, cols: int, dtype: torch.dtype, config: launch.Forward | launch.Backward) -> None:
    """Fill Triton's cache, from a process of its own."""
    for step in Problem(pass_, cols, dtype, "meta").plan(config):
        step.kernel.warmup(*step.arguments, grid=step.grid, enable_fp_fusion=True, **step.options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pass", dest="passes", default="forward,backward")
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--cols", default=",".join(map(str, COLS)))
    parser.add_argument("--only", default="", help="a regular expression that configurations must match")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new cells after this time")
    arguments = parser.parse_args()
    cells = [
        (pass_, cols, getattr(torch, dtype))
        for pass_ in arguments.passes.split(",")
        for dtype in arguments.dtype.split(",")
        for cols in map(int, arguments.cols.split(","))
    ]
    work = [
        (*cell, config)
        for cell in cells
        for config in candidates(cell[0], cell[1], cell[2].itemsize)
        if re.search(arguments.only, repr(config))
    ]
    # Tiles that differ in the number of programs alone are one kernel.
    kernels = {(*cell, replace(c, programs_per_sm=1) if isinstance(c, BackwardTile) else c) for *cell, c in work}
    began = time.monotonic()
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        compiled = [pool.submit(compile_only, *item) for item in kernels]
        errors = [error for future in compiled if (error := future.exception()) is not None]
    took = time.monotonic() - began
    print(f"{len(kernels)} kernels for {len(work)} configurations compiled in {took:.0f} s", flush=True)
    print(f"{len(errors)} did not compile", *errors[:2], flush=True)

    timer = Timer()
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pass", "cols", "dtype", "config", "ms", "of_copy"])
        for pass_, cols, dtype in cells:
            if time.monotonic() - began > arguments.seconds:
                print("out of time", file=sys.stderr)
                break
            problem = Problem(pass_, cols, dtype, "cuda")
            copy_ms = timer(lambda p=problem: p.out.copy_(p.x)).p50
            roof = 2 * problem.x.nbytes / copy_ms
            launch.run(problem.x.device, problem.plan(None))
            expected = problem.out.clone(), problem.dweight.clone()
            rows = []
            for _, _, _, config in (item for item in work if item[:3] == (pass_, cols, dtype)):
                try:
                    plan = problem.plan(config)
                    problem.out.fill_(float("nan"))
                    launch.run(problem.x.device, plan)
                    for actual, right in zip((problem.out, problem.dweight), expected, strict=True):
                        if not torch.allclose(actual, right, rtol=2e-2, atol=float(right.abs().max()) * 1e-2):
                            raise ValueError("wrong result")
                    ms = timer(lambda p=plan, d=problem.x.device: launch.run(d, p), repeats=20, warmup=2).p50
                except Exception as error:
                    print(f"{pass_} {cols} {dtype} {config}: {str(error)[:120]}", file=sys.stderr)
                    continue
                rows.append((ms, problem.min_bytes() / ms / roof, config))
            rows.sort(key=lambda row: row[0])
            for ms, fraction, config in rows:
                name = type(config).__name__ + str(tuple(asdict(config).values()))
                writer.writerow([pass_, cols, str(dtype)[6:], name, f"{ms:.5f}", f"{fraction:.4f}"])
            file.flush()
            best = "; ".join(f"{f:.3f} {type(c).__name__}{tuple(asdict(c).values())}" for _, f, c in rows[:4])
            print(f"{pass_} {str(dtype)[6:]} {cols}: roof {roof / 1e6:.0f} GB/s; {best}", flush=True)


if __name__ == "__main__":
    main()
