from dataclasses import replace

import pytest
import torch
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile
from fusednorm.ops.layer_norm.forward.sweep import LayerNormForwardSweep
from fusednorm.ops.layer_norm.forward.tile import LayerNormForwardTile

from benchmarks.tune.layer_norm.trials import (
    LayerNormTuningCell,
    LayerNormTuningPass,
    select_distinct_kernels,
    time_cell,
)
from tests.benchmarks.harness.fake_timer import Timer

SHORT = LayerNormTuningCell("forward", 256, "float32")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr("benchmarks.workload.benchmark_cells.X_BYTES", 6 << 10)


@pytest.mark.parametrize(
    ("pass_", "configs"),
    [
        ("forward", [LayerNormForwardTile(2, 1, 256, 1), LayerNormForwardSweep(128, 1)]),
        ("backward", [LayerNormBackwardTile(2, 256, 1, 3, 1, True), LayerNormBackwardTile(4, 256, 2, 3, 1, False)]),
    ],
)
def test_the_fastest_comes_first(device, pass_, configs):
    rows = time_cell(LayerNormTuningCell(pass_, 256, "float32"), configs, Timer(), device)
    assert [row.config for row in rows] == configs[::-1]
    tensors = 2 if pass_ == "forward" else 3
    assert rows[1].of_copy == pytest.approx(tensors / 2 / 0.99)


def test_an_activation_follows_the_affine_step(device):
    plain, silu = (LayerNormTuningPass(replace(SHORT, activation=name), device) for name in ("none", "silu"))
    for each in (plain, silu):
        for role, value in (("x", 2.0), ("weight", 1.0), ("bias", 3.0)):
            each._tensors[role].fill_(value)
        each.run_launches(each.plan_launches())
    assert torch.equal(plain.results[0], torch.full_like(plain.x, 3.0))
    assert torch.allclose(silu.results[0], torch.nn.functional.silu(plain.results[0]))


def test_what_disagrees_with_the_table_s_choice_is_not_timed(device, capsys):
    half_a_row = LayerNormForwardTile(1, 1, 128, 1)
    assert time_cell(SHORT, [half_a_row], Timer(), device) == []
    assert "result 0 is wrong" in capsys.readouterr().err


def test_tiles_that_differ_in_programs_alone_are_compiled_once():
    cell = LayerNormTuningCell("backward", 256, "float32")
    tiles = [(cell, LayerNormBackwardTile(2, 256, 1, 3, programs, True)) for programs in (1, 2, 3)]
    other = (cell, LayerNormBackwardTile(2, 256, 1, 4, 1, True))
    assert select_distinct_kernels([*tiles, other]) == [tiles[0], other]
