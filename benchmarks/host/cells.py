"""The timed cells: functions that autograd calls, and modules forward and backward; the hardest targets first.

A forward function writes statistics, a backward function reads them.  The pass `forward_backward` is a module,
whose gradients are those of x and of the parameters.
"""

from collections.abc import Iterator
from itertools import product

from benchmarks.workload.benchmark_cells import KernelCell

FORWARD_BACKWARD = "forward_backward"

_FEW, _MANY, _SHORT = ((16, 4096), "bfloat16"), ((1151, 8192), "float16"), ((65536, 768), "bfloat16")
_IMAGES, _LARGER_IMAGES = (2, 1280, 16, 16), (16, 320, 64, 64)
_LAYOUTS = ("nchw", "nhwc")
_FUNCTIONS = ("forward", "backward")


def _make_row_cell(op: str, pass_: str, of: tuple[tuple[int, int], str]) -> KernelCell:
    shape, dtype = of
    return KernelCell(op, pass_, "plain", shape, 0, dtype, "rows")


def _make_image_cell(pass_: str, variant: str, shape: tuple[int, ...], layout: str) -> KernelCell:
    return KernelCell("group_norm", pass_, variant, shape, 32, "bfloat16", layout)


def _iterate_cells() -> Iterator[KernelCell]:
    for pass_ in _FUNCTIONS:
        yield _make_row_cell("layer_norm", pass_, _FEW)
        yield from (_make_image_cell(pass_, "plain", _IMAGES, layout) for layout in _LAYOUTS)
    for of, op in product((_FEW, _MANY), ("layer_norm", "rms_norm")):
        yield _make_row_cell(op, FORWARD_BACKWARD, of)
    yield from (_make_image_cell(FORWARD_BACKWARD, "silu", _IMAGES, layout) for layout in _LAYOUTS)
    yield _make_image_cell(FORWARD_BACKWARD, "silu", _LARGER_IMAGES, "nhwc")
    for of, pass_ in product((_MANY, _SHORT), _FUNCTIONS):
        yield _make_row_cell("layer_norm", pass_, of)
    for of, pass_ in product((_FEW, _MANY, _SHORT), _FUNCTIONS):
        yield _make_row_cell("rms_norm", pass_, of)


CELLS = tuple(_iterate_cells())
"""In the order in which they are timed."""
