"""Times each form of a forward pass: the table's choice, and the forms that could replace it.

    python -m benchmarks.kernels.alternatives --out alternatives.csv

A form that is never faster and is not the only one for any shape can be removed.  Fractions are of a copy of x in
the same run.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.execution import run_launches
from fusednorm.launch.launches import Launch
from fusednorm.launch.recorded_launches import bind_to_meta_tensors
from fusednorm.ops.group_norm import call as group_call
from fusednorm.ops.group_norm import forward_choice
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.ops.group_norm.statistics import find_split_forward
from fusednorm.ops.layer_norm import choices, config_tables
from fusednorm.ops.layer_norm.call import LayerNormForwardCall
from fusednorm.ops.layer_norm.config_tables import ForwardConfig
from fusednorm.results import Forward
from fusednorm.tensors.arrays import describe_as_array
from torch import Tensor

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.harness.timing import DeviceTimer
from benchmarks.harness.worker_pool import count_workers, run_in_workers
from benchmarks.workload.problems import EPS

GROUPS = 32
CHOSEN = "chosen"
COLUMNS = ("what", "form", "kernels", "ms", "of_copy")

_BF16, _F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class AlternativeCell:
    """One forward pass in one form: of rows where `shape` has two axes, else of samples, with SiLU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    form: str
    channels_last: bool = False
    residual: bool = False

    @property
    def name(self) -> str:
        """1024x131072 bfloat16."""
        parts = ["x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")]
        parts += ["channels-last"] * self.channels_last + ["residual"] * self.residual
        return " ".join(parts)


_WITH_RESIDUAL = (
    *((shape, _BF16) for shape in ((8, 512, 64, 64), (16, 512, 64, 64), (2, 512, 64, 64))),
    *((shape, _F32) for shape in ((32, 256, 56, 56), (8, 256, 64, 64))),
)
_CONTIGUOUS = (
    *((shape, _BF16) for shape in ((8, 512, 64, 64), (2, 320, 64, 64), (16, 320, 64, 64), (2, 1280, 16, 16))),
    *((shape, _BF16) for shape in ((2, 640, 32, 32), (32, 256, 56, 56), (64, 1280, 16, 16))),
    *((shape, _F32) for shape in ((2, 320, 64, 64), (16, 320, 64, 64), (8, 512, 64, 64))),
)
_CHANNELS_LAST = tuple(
    (shape, dtype) for shape in ((2, 2560, 16, 16), (2, 2560, 32, 32)) for dtype in (_F32, _BF16)
)
_ROWS = (
    *((shape, _BF16) for shape in ((1024, 131072), (256, 262144), (64, 524288), (16, 1 << 20))),
    *((shape, _F32) for shape in ((512, 65536), (128, 262144))),
    *((shape, _BF16) for shape in ((16, 131072), (4096, 16384), (1024, 49152))),
)


def iterate_cells() -> Iterator[AlternativeCell]:
    """Every cell, the table's choice of each shape first."""
    of_groups, of_rows = (CHOSEN, "never waiting", "split"), (CHOSEN, "sweep", "split")
    yield from (AlternativeCell(*each, form, residual=True) for each in _WITH_RESIDUAL for form in of_groups)
    yield from (AlternativeCell(*each, form) for each in _CONTIGUOUS for form in of_groups)
    yield from (AlternativeCell(*each, form, channels_last=True) for each in _CHANNELS_LAST for form in of_groups)
    yield from (AlternativeCell(*each, form) for each in _ROWS for form in of_rows)


def plan_cell(cell: AlternativeCell, device: str) -> tuple[list[Launch], dict[str, Tensor]]:
    """The launches of a cell over random tensors, and these tensors."""
    fill = partial(torch.empty if device == "meta" else torch.randn, dtype=cell.dtype, device=device)

    def make_tensor() -> Tensor:
        if cell.channels_last:
            n, c, height, width = cell.shape
            return fill(n, height, width, c).permute(0, 3, 1, 2)
        return fill(cell.shape)

    parameters = cell.shape[1]
    tensors = {"x": make_tensor(), "weight": fill(parameters), "bias": fill(parameters)}
    tensors["y"] = torch.empty_like(tensors["x"])
    if cell.residual:
        tensors |= {"residual": make_tensor(), "residual_out": torch.empty_like(tensors["x"])}
    arrays = {name: describe_as_array(name, tensor) for name, tensor in tensors.items()}
    x, residual = arrays["x"], arrays.get("residual")
    out = Forward(arrays["y"], residual_out=arrays.get("residual_out"))
    if len(cell.shape) == 2:
        forms: dict[str, ForwardConfig] = {
            "sweep": choices.choose_sweep(cell.shape[1]),
            "split": config_tables.FORWARD_SPLIT[x.element_size()],
        }
        options = NormOptions("layer_norm", eps=EPS)
        call = LayerNormForwardCall(x=x, weight=arrays["weight"], bias=arrays["bias"], options=options, out=out)
        return choices.plan_forward(call, forms.get(cell.form)), tensors
    _, c, height, width = cell.shape
    sample = SampleShape(GROUPS, c // GROUPS, height * width, cell.channels_last)
    of_groups = {"never waiting": forward_choice.find_two_pass_forward, "split": find_split_forward}
    config = None if cell.form == CHOSEN else of_groups[cell.form](sample, x.element_size())
    of_group = group_call.GroupNormForwardCall(
        x=x,
        sample=sample,
        affine=AffineParameters(arrays["weight"], arrays["bias"]),
        options=NormOptions("group_norm", GROUPS, EPS, activation="silu"),
        residual=residual,
        out=out,
    )
    return forward_choice.plan_forward(of_group, config), tensors


def compile_cell(cell: AlternativeCell) -> None:
    """Fill Triton's cache, in a worker process."""
    for step in plan_cell(cell, "meta")[0]:
        arguments = bind_to_meta_tensors(step.arguments)
        step.kernel.warmup(*arguments, grid=step.grid, enable_fp_fusion=True, **step.options)


def measure_cell(cell: AlternativeCell, timer: DeviceTimer) -> tuple[str, float, float]:
    """The kernels of a cell, its milliseconds, and the fraction of a copy that it reaches."""
    launches, tensors = plan_cell(cell, "cuda")
    x, y = tensors["x"], tensors["y"]
    copy = timer(lambda: y.copy_(x), repeats=15).p50
    ms = timer(partial(run_launches, x.device, launches, tensors), repeats=15).p50
    return "+".join(step.kernel.fn.__name__ for step in launches), ms, copy / ms * (2 if cell.residual else 1)


def main() -> None:
    """Measure every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    given = parser.parse_args()
    run_in_workers(compile_cell, list(iterate_cells()), workers=count_workers(), seconds=120)
    timer = DeviceTimer()
    results = CsvResults(given.out, COLUMNS, given.commit)
    for cell in iterate_cells():
        kernels, ms, of_copy = measure_cell(cell, timer)
        row = (cell.name, cell.form, kernels, f"{ms:.4f}", f"{of_copy:.3f}")
        results.add_row(dict(zip(COLUMNS, row, strict=True)))


if __name__ == "__main__":
    main()
