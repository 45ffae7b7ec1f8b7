from itertools import product

import pytest
from fusednorm.ops.group_norm.backward_choice import choose_backward
from fusednorm.ops.group_norm.forward_choice import choose_forward

from benchmarks.tune.group_norm.__main__ import LAYOUTS, SHAPES
from benchmarks.tune.group_norm.trials import GroupNormTuningCell


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_each_cell_has_the_tables_choice_and_others_once_each(pass_):
    choose = choose_forward if pass_ == "forward" else choose_backward
    for shape, layout in product(SHAPES, LAYOUTS):
        cell = GroupNormTuningCell(pass_, shape, layout, "bfloat16")
        configs = list(cell.iterate_configs())
        assert configs[0] == choose(cell.sample, 2, 132)
        assert 5 <= len(configs) == len(set(configs)) <= 30
