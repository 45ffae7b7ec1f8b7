"""Which configuration is chosen for a row, where the tables alone do not say it."""

import pytest
from fusednorm.arguments.arrays import Array, contiguous_strides
from fusednorm.arguments.options import NormOptions
from fusednorm.devices.device_properties import H200
from fusednorm.launch.launches import REGISTERS_PER_SM
from fusednorm.ops.layer_norm import choices
from fusednorm.ops.layer_norm import config_tables as tables
from fusednorm.ops.layer_norm.backward import partial_reduction
from fusednorm.ops.layer_norm.backward.cooperative import LayerNormBackwardCooperative
from fusednorm.ops.layer_norm.call import SINGLE_ROW_COLS, LayerNormBackwardCall
from fusednorm.ops.layer_norm.forward import split
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative
from fusednorm.ops.layer_norm.forward.resident import LayerNormForwardResident
from fusednorm.ops.layer_norm.forward.split import LayerNormForwardSplit
from fusednorm.ops.layer_norm.forward.sweep import LayerNormForwardSweep
from fusednorm.ops.layer_norm.forward.tile import LayerNormForwardTile
from fusednorm.policy import cooperative_launches
from fusednorm.results import Backward

MULTIPROCESSORS = 132


@pytest.fixture
def compiled(monkeypatch):
    """As on a GPU, where programs can wait for one another."""
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", False)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_residual_leaves_programs_their_registers(itemsize, compiled):
    for limit, choice in tables.FORWARD[itemsize]:
        with_residual = choices.choose_forward(limit, itemsize, MULTIPROCESSORS, has_residual=True)
        if isinstance(choice, LayerNormForwardResident) and isinstance(with_residual, LayerNormForwardResident):
            assert 1 <= with_residual.programs_per_sm <= choice.programs_per_sm
            threads = 32 * choice.num_warps * with_residual.programs_per_sm
            held = 2 * choice.chunks * itemsize * (2 if itemsize == 2 else 1)
            assert held * threads < REGISTERS_PER_SM
        elif isinstance(choice, LayerNormForwardResident):
            assert isinstance(with_residual, LayerNormForwardCooperative)


def test_long_rows_of_single_16_bit_elements_with_a_residual_have_half_the_chunks(compiled):
    """So that the addresses of all loads stay in registers; `test_compiled` looks at local memory."""
    for cols in (50257, 131071, 524287):
        odd, even = (
            choices.choose_forward(length, 2, MULTIPROCESSORS, has_residual=True) for length in (cols, cols - 1)
        )
        assert isinstance(odd, LayerNormForwardCooperative)
        assert isinstance(even, LayerNormForwardCooperative)
        assert odd.chunks * 2 == even.chunks
        assert odd.programs_per_sm > even.programs_per_sm


@pytest.mark.parametrize("itemsize", [2, 4])
def test_odd_lengths_have_entries_of_their_own_and_their_neighbours_have_not(itemsize, compiled):
    for first, last, choice in tables.FORWARD_UNALIGNED[itemsize]:
        assert choices.choose_forward(first, itemsize, MULTIPROCESSORS, has_residual=False) == choice
        assert choices.choose_forward(last // 8 * 8, itemsize, MULTIPROCESSORS, has_residual=False) != choice


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_single_very_long_row_is_cut_as_several_are(itemsize, compiled):
    cols = SINGLE_ROW_COLS
    several = choices.choose_forward(cols, itemsize, MULTIPROCESSORS, has_residual=False)
    single = choices.choose_forward(cols, itemsize, MULTIPROCESSORS, has_residual=False, is_single_row=True)
    assert isinstance(several, LayerNormForwardCooperative)
    assert isinstance(single, LayerNormForwardSplit)
    assert (single.chunks, single.num_warps) == (several.chunks, several.num_warps)
    assert (
        choices.choose_forward(cols - 1, itemsize, MULTIPROCESSORS, has_residual=False, is_single_row=True)
        != single
    )


def test_programs_wait_for_one_another_only_where_they_can(monkeypatch):
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", True)
    assert isinstance(
        choices.choose_forward(1 << 18, 4, MULTIPROCESSORS, has_residual=False), LayerNormForwardSweep
    )


LONGEST_HELD = {(2, False): 65536, (4, False): 32768, (2, True): 32768, (4, True): 24576}
"""Columns of the longest row that one program holds, by bytes of an element and whether a residual comes."""


@pytest.mark.parametrize(("itemsize", "residual"), LONGEST_HELD)
def test_long_rows_are_swept_only_as_heads_and_where_nothing_waits(itemsize, residual, compiled, monkeypatch):
    held = LONGEST_HELD[itemsize, residual]

    def is_swept(cols, heads):
        return isinstance(
            choices.choose_forward(cols, itemsize, MULTIPROCESSORS, residual, heads), LayerNormForwardSweep
        )

    assert not is_swept(held, heads=True)
    assert is_swept(held + 8, heads=True)
    assert not is_swept(held + 8, heads=False)
    assert not is_swept(1 << 23, heads=False)
    monkeypatch.setattr(cooperative_launches, "_allowed", False)
    assert not is_swept(held, heads=False)
    assert is_swept(held + 8, heads=False)
    assert is_swept(1 << 19, heads=False)
    assert not is_swept((1 << 19) + 8, heads=False)
    assert is_swept((1 << 19) + 8, heads=True)


@pytest.mark.parametrize("cols", [64, 2048, 16384])
def test_statistics_alone_hold_no_row(cols):
    assert not isinstance(
        choices.choose_statistics(cols, 2, MULTIPROCESSORS, False), LayerNormForwardTile | LayerNormForwardResident
    )


@pytest.mark.parametrize("partials", [1, 66, 132, 528, 1584, 5000])
def test_all_partials_are_added_up_at_once_where_registers_allow(partials):
    tile = partial_reduction.choose_reduction_tile(partials)
    assert tile["BLOCK_P"] >= min(partials, partial_reduction.MAX_PARTIALS)
    assert tile["BLOCK_P"] * tile["BLOCK_N"] <= 32 * 32 * tile["num_warps"]


def test_parts_are_spread_before_they_are_gathered():
    assert split.count_parts_per_program(128) == 1
    assert 1 < split.count_parts_per_program(1 << 13) <= split.MAX_PARTS_A_PROGRAM
    assert split.count_parts_per_program(1 << 20) == split.MAX_PARTS_A_PROGRAM


def plan_backward(
    op, cols, dtype="bfloat16", device=H200, has_residual=False, is_modulated=False, has_gate=False, **options
):
    """The launches of a backward pass over 4096 rows, or with a scale, and a gate, of each of 8 samples."""
    is_modulated, has_residual = is_modulated or has_gate, has_residual or has_gate
    shape = (8, 512, cols) if is_modulated else (4096, cols)
    x = Array("x", dtype, shape, contiguous_strides(shape), device)
    rows = Array("rstd", "float32", shape[:-1], contiguous_strides(shape[:-1]), device)
    weight = None if is_modulated else Array("weight", dtype, (cols,), (1,), device)
    scale = Array("scale", dtype, (8, cols), (cols, 1), device) if is_modulated else None
    mean = None if op == "rms_norm" else rows
    gate = Array("gate", dtype, (8, cols), (cols, 1), device) if has_gate else None
    given = {"x": x, "dy": x, "weight": weight, "mean": mean, "rstd": rows, "scale": scale, "gate": gate}
    if has_residual:
        given["residual"] = x
    checked = NormOptions(op, **options).validate()
    out = Backward(x, weight, dresidual=x if has_gate else None, dscale=scale, dgate=gate)
    return choices.plan_backward(LayerNormBackwardCall(**given, options=checked, out=out))


def plan_backward_without_waiting(op, cols, dtype="bfloat16", **options):
    """The names of the kernels of a backward pass on a device where no program can wait."""
    launches = plan_backward(op, cols, dtype, H200._replace(has_launch_options=False), **options)
    return {launch.kernel.fn.__name__.removeprefix("layer_norm_backward_") for launch in launches}


def choose_backward_tile(cols, **further):
    """The tile of a backward pass over 16-bit rows."""
    launch = plan_backward("layer_norm", cols, **further)[0]
    names = ("ROWS", "CHUNKS", "BLOCK_N", "num_warps", "HOLD_WEIGHT", "maxnreg")
    return tuple(launch.options[name] for name in names)


EPILOGUES = ({"activation": "silu"}, {"dropout": 0.1, "seed": 1})


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("cols", [512, 1024, 1280, 2048, 2560, 3072, 4096, 8192, 12288])
def test_an_activation_and_dropout_have_a_tile_of_their_own(cols, epilogue):
    of_plain_rows = choose_backward_tile(cols)
    assert choose_backward_tile(cols, **epilogue) != of_plain_rows
    assert choose_backward_tile(cols, has_residual=True, **epilogue) != of_plain_rows
    for light in ({"has_residual": True}, {"is_modulated": True}):
        assert choose_backward_tile(cols, **light) == of_plain_rows


@pytest.mark.parametrize("cols", [3072, 4096, 5120, 7168])
def test_a_gate_has_a_tile_of_its_own(cols):
    assert choose_backward_tile(cols, has_gate=True) != choose_backward_tile(cols)


@pytest.mark.parametrize("further", [{}, *EPILOGUES])
def test_odd_rows_keep_their_tile_with_an_activation_and_dropout(further):
    assert choose_backward_tile(1001, **further)[:4] == (2, 1, 1024, 4)


ONCE, TWICE = {"tile_kernel", "reduce_kernel"}, {"split_sums_kernel", "split_apply_kernel", "reduce_kernel"}


@pytest.mark.parametrize("cols", [12296, 16384])
def test_rows_that_one_program_holds_are_read_once_where_nothing_waits(cols):
    assert plan_backward_without_waiting("layer_norm", cols) == ONCE
    assert plan_backward_without_waiting("rms_norm", cols, activation="silu") == ONCE
    # These need more registers.
    assert plan_backward_without_waiting("layer_norm", cols, activation="silu") == TWICE
    assert plan_backward_without_waiting("rms_norm", cols, "float32") == TWICE
    assert plan_backward_without_waiting("rms_norm", cols + 1) == TWICE
    assert plan_backward_without_waiting("rms_norm", cols + 16384) == TWICE


@pytest.mark.parametrize("itemsize", [2, 4])
def test_shared_rows_with_a_residual_keep_two_programs_a_multiprocessor(itemsize, compiled):
    for limit, choice in tables.BACKWARD[itemsize]:
        if isinstance(choice, LayerNormBackwardCooperative):
            cols = min(limit, 540672)
            fused = choices.choose_backward(cols, itemsize, MULTIPROCESSORS, is_plain=False)
            assert isinstance(fused, LayerNormBackwardCooperative)
            assert 2 <= fused.programs_per_sm <= choice.programs_per_sm


def test_no_sums_are_left_where_each_column_has_one_program():
    assert plan_backward_without_waiting("layer_norm", 1 << 18) == TWICE
    assert plan_backward_without_waiting("layer_norm", 1 << 20) == TWICE - {"reduce_kernel"}
