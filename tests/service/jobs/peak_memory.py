"""Runs operations on the CPU backend and prints what each took at most, beside what the model says.

A program of its own: the peak of a process that has done other things says nothing.  One JSON line a case.
"""

import ctypes
import gc
import json
import re
import sys
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path

import torch
from normserve.backends.cpu.backend import CpuBackend
from normserve.backends.tensor_conversion import TORCH_DTYPES
from normserve.jobs.job import LAYER_OPS, Batch, ChannelLayout, NormSpec, Op, PassDirection
from normserve.jobs.validation import make_validated_job
from normserve.memory.tensors import DType, HostTensor

MIB = 2**20
F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
STATUS = Path("/proc/self/status")

# Shapes of 2 Mi elements: many short rows, one long row, and what is in between.
ROWS = [(2 * MIB, 1), (MIB // 32, 64), (2048, 1024), (1, 2 * MIB), (2, MIB)]
# Channels first: many tiny groups, one value a channel, large samples, groups that are longer than a piece.
SAMPLES = [(MIB // 4, 8, 1), (MIB // 32, 8, 8), (2, 256, 64, 64), (1, 32, 256, 256), (1, 2 * MIB, 1), (1, 2, MIB)]

Case = tuple[str, NormSpec, dict[str, HostTensor], bool]


def main() -> None:
    backend = CpuBackend(1)
    torch.set_num_threads(1)
    # What is imported needs no looking through before each case.
    gc.freeze()
    noise = torch.randn(2 * MIB)
    for name, spec, tensors, may_overwrite in cases(noise):
        job, cost = make_validated_job(spec, tensors, may_overwrite=may_overwrite)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        execution = backend.run(Batch((job,)))
        peak = resident("VmHWM") - before
        results = sum(len(tensor.data) for tensor in execution.results[0].values())
        line = {
            "name": name,
            "peak": peak,
            "model": cost.count_cpu_bytes(may_overwrite=may_overwrite),
            "results": [results, cost.result_bytes],
        }
        print(json.dumps(line), flush=True)
        del job, execution


def cases(noise: torch.Tensor) -> Iterator[Case]:
    """Each shape with all that there is in one direction, and with less in the other; then what rows alone take."""
    for op, direction in product(LAYER_OPS, PassDirection):
        forms = [*product(SAMPLES, (ChannelLayout.NCHW,))]
        if op is Op.GROUP_NORM:
            forms += product(SAMPLES, (ChannelLayout.NHWC,))
        else:
            forms += [*product(ROWS, (None,)), ((1, MIB, 2), ChannelLayout.NCHW)]
        for index, (shape, layout) in enumerate(forms):
            if (index + (direction is PassDirection.FORWARD)) % 2:
                yield case(noise, op, direction, F16, layout, shape, True, True)
            else:
                yield case(noise, op, direction, F32, layout, shape, index % 4 < 2, index % 3 == 0)
    yield from cases_of_rows(noise)
    yield from cases_of_samples_of_rows(noise)


def cases_of_rows(noise: torch.Tensor) -> Iterator[Case]:
    """Parameters of each head, an offset of weight, a residual of its own type, float8."""
    for op, direction, shape in product(
        (Op.LAYER_NORM, Op.RMS_NORM), PassDirection, [(32, 1024, 64), (1, 2048, 1024), (2, MIB), (1, 2, MIB)]
    ):
        heads, forward = len(shape) == 3, direction is PassDirection.FORWARD
        if heads and not forward and shape[-1] > 8192:
            continue
        of = shape[-2:] if heads else shape[-1:]
        tensors = {name: tensor(noise, F16, shape) for name in (["x"] if forward else ["x", "dy", "dresidual_out"])}
        tensors |= {"residual": tensor(noise, F32, shape), "weight": tensor(noise, F32 if forward else BF16, of)}
        if op is Op.LAYER_NORM:
            tensors["bias"] = tensor(noise, BF16, of)
        float8 = DType.FLOAT8_E4M3FN if forward and not heads else None
        spec = NormSpec(op, direction, 1e-5, out_dtype=float8, stats=forward, weight_offset=1.0)
        yield f"{op.value} {direction.value} {list(shape)} of {list(of)}, {float8}", spec, tensors, forward


def cases_of_samples_of_rows(noise: torch.Tensor) -> Iterator[Case]:
    """Scale, shift and gate of long samples, of each row, and of rows that are longer than a piece."""
    for op, direction, (shape, of) in product(
        (Op.LAYER_NORM, Op.RMS_NORM),
        PassDirection,
        [
            ((32, 1024, 64), (32, 64)),
            ((2048, 1024), (2048, 1024)),
            ((1, 2 * MIB), (2 * MIB,)),
            ((2, MIB), (2, MIB)),
            ((1, 3, MIB // 2), (1, MIB // 2)),
        ],
    ):
        forward = direction is PassDirection.FORWARD
        tensors = {name: tensor(noise, F32, shape) for name in (["x"] if forward else ["x", "dy"])}
        tensors |= {"scale": tensor(noise, F16, of), "shift": tensor(noise, BF16, of)}
        if len(of) > 1:
            tensors |= {"residual": tensor(noise, F16, shape), "gate": tensor(noise, BF16, of)}
        spec = NormSpec(op, direction, 1e-5, activation="silu")
        yield f"{op.value} {direction.value} {list(shape)}, scale {list(of)}", spec, tensors, forward


def case(
    noise: torch.Tensor,
    op: Op,
    direction: PassDirection,
    dtype: DType,
    layout: ChannelLayout | None,
    shape: tuple[int, ...],
    everything: bool,
    epilogue: bool,
) -> Case:
    size, samples = shape[1], shape[0]
    if layout is ChannelLayout.NHWC:
        shape = (samples, *shape[2:], size)
    forward = direction is PassDirection.FORWARD
    like_x = ["x"] if forward else ["x", "dy"]
    tensors = {}
    if everything:
        like_x += ["residual"] if forward else ["residual", "dresidual_out"]
        tensors["weight"] = tensor(noise, BF16, (size,))
        if op is not Op.RMS_NORM:
            tensors["bias"] = tensor(noise, F32, (size,))
        if layout is not None:
            tensors["scale"] = tensor(noise, F16, (samples, size))
            tensors["shift"] = tensor(noise, F32, (samples, size))
            if op is not Op.GROUP_NORM:
                tensors["gate"] = tensor(noise, BF16, (samples, size))
    tensors |= {name: tensor(noise, dtype, shape) for name in like_x}
    spec = NormSpec(
        op,
        direction,
        1e-5,
        2 if op is Op.GROUP_NORM else 0,
        layout,
        activation="gelu_tanh" if epilogue else "none",
        dropout=0.1 if epilogue and everything else 0.0,
        seed=3 if epilogue and everything else None,
        out_dtype=F32 if everything and forward else None,
        stats=everything and forward,
    )
    asked = f"everything={everything} epilogue={epilogue}"
    name = f"{op.value} {direction.value} {dtype.value} {list(shape)} {layout and layout.value} {asked}"
    return name, spec, tensors, forward


def tensor(noise: torch.Tensor, dtype: DType, shape: tuple[int, ...]) -> HostTensor:
    copy = noise[: prod(shape)].to(TORCH_DTYPES[dtype], copy=True)
    return HostTensor(dtype, shape, memoryview(copy.view(torch.uint8).numpy()))


def resident(name: str) -> int:
    """A line of this process's status, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    sys.exit(main())
