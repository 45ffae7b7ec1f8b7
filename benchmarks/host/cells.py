"""The timed cells: functions that autograd calls, and modules forward and backward; the hardest targets first.

A forward function writes statistics, a backward function reads them.  The pass `forward_backward` is a module,
whose gradients are those of x and of the parameters.
"""

from collections.abc import Iterator
from itertools import product

from benchmarks.workload.cells import Cell

FORWARD_BACKWARD = "forward_backward"

_FEW, _MANY, _SHORT = ((16, 4096), "bfloat16"), ((1151, 8192), "float16"), ((65536, 768), "bfloat16")
_IMAGES, _LARGER_IMAGES = (2, 1280, 16, 16), (16, 320, 64, 64)
_LAYOUTS = ("nchw", "nhwc")
_FUNCTIONS = ("forward", "backward")


def _rows(op: str, pass_: str, of: tuple[tuple[int, int], str]) -> Cell:
    shape, dtype = of
    return Cell(op, pass_, "plain", shape, 0, dtype, "rows")


def _images(pass_: str, variant: str, shape: tuple[int, ...], layout: str) -> Cell:
    return Cell("group_norm", pass_, variant, shape, 32, "bfloat16", layout)


def _cells() -> Iterator[Cell]:
    for pass_ in _FUNCTIONS:
        yield _rows("layer_norm", pass_, _FEW)
        yield from (_images(pass_, "plain", _IMAGES, layout) for layout in _LAYOUTS)
    for of, op in product((_FEW, _MANY), ("layer_norm", "rms_norm")):
        yield _rows(op, FORWARD_BACKWARD, of)
    yield from (_images(FORWARD_BACKWARD, "silu", _IMAGES, layout) for layout in _LAYOUTS)
    yield _images(FORWARD_BACKWARD, "silu", _LARGER_IMAGES, "nhwc")
    for of, pass_ in product((_MANY, _SHORT), _FUNCTIONS):
        yield _rows("layer_norm", pass_, of)
    for of, pass_ in product((_FEW, _MANY, _SHORT), _FUNCTIONS):
        yield _rows("rms_norm", pass_, of)


CELLS = tuple(_cells())
"""In the order in which they are timed."""
