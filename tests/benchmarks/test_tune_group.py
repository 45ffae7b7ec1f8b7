"""What the tuning run of GroupNorm sets out to do: everything that is needed, in the time of one run."""

import pytest
from fusednorm.group_norm_backward_launch import choose_backward
from fusednorm.group_norm_forward_launch import choose_forward

from benchmarks.tune_group import LAYOUTS, SHAPES, Cell, kernels_of

CELLS = {
    pass_: [Cell(pass_, shape, layout, "bfloat16") for shape in SHAPES for layout in LAYOUTS]
    for pass_ in ("forward", "backward")
}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_each_cell_has_the_tables_choice_and_others_once_each(pass_):
    choose = choose_forward if pass_ == "forward" else choose_backward
    for cell in CELLS[pass_]:
        configs = list(cell.configs())
        assert configs[0] == choose(cell.sample, 2, 132)
        assert 5 <= len(configs) == len(set(configs)) <= 30


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_kernels_are_few_enough_to_compile_at_once_and_come_in_the_order_of_the_cells(pass_):
    kernels = kernels_of({cell: list(cell.configs()) for cell in CELLS[pass_]})
    assert list(kernels) == CELLS[pass_]
    assert sum(map(len, kernels.values())) <= 450


def test_kernels_that_cells_share_are_compiled_for_the_first():
    cell = Cell("forward", (8, 512, 64, 64), "nchw", "bfloat16")
    fewer = Cell("forward", (7, 512, 64, 64), "nchw", "bfloat16")
    configs = list(cell.configs())
    kernels = kernels_of({cell: configs, fewer: configs})
    assert kernels[cell]
    assert not kernels[fewer]
