"""Each cell of the comparison of forms is planned in the form that it names."""

import pytest

from benchmarks.kernels.alternatives import CHOSEN, iterate_cells, plan_cell

CELLS = [cell for cell in iterate_cells() if cell.form != CHOSEN]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.name} {cell.form}")
def test_a_form_is_planned_as_it_is_named(cell):
    launches, tensors = plan_cell(cell, "meta")
    names = [step.kernel.__name__ for step in launches]
    assert tensors["x"].shape == tensors["y"].shape == cell.shape
    if cell.form == "split":
        parts = "columns" if cell.channels_last else "split"
        assert all(parts in name or "reduce" in name for name in names)
    else:
        assert not any("resident" in name or "cooperative" in name for name in names)
