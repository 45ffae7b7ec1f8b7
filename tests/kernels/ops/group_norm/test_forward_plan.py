"""The launches of GroupNorm forward by the forms that never wait: what covers a sample, and in what parts."""

import pytest
import torch
from fusednorm.arguments.arrays import Array, Workspace
from fusednorm.arguments.options import NormOptions
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.ops.group_norm import forward_choice as group_norm_forward_launch
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.call import GroupNormForwardCall
from fusednorm.ops.group_norm.channels_last.forward.columns import ForwardColumnSplit
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident
from fusednorm.ops.group_norm.contiguous.forward.split import GroupNormForwardSplit
from fusednorm.ops.group_norm.contiguous.forward.sweep import GroupNormForwardSweep
from fusednorm.ops.group_norm.contiguous.forward.tile import GroupNormForwardTile
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.moment_reduction import REDUCE_BLOCK, REDUCE_NUM_WARPS, choose_reduction_tile
from fusednorm.ops.group_norm.sample_shape import WIDE_GROUP, SampleShape
from fusednorm.ops.group_norm.statistics import plan_statistics
from fusednorm.results import Forward
from fusednorm.tensors.arrays import describe_as_array

from tests.kernels.harness.arrays import make
from tests.kernels.ops.group_norm.cases import channels_last

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs tensors of the host")

N, GROUPS = 3, 2
SPLIT = GroupNormForwardSplit(tile_vectors=16, split_vectors=40, program_vectors=24, num_warps=4)
COLUMNS = ForwardColumnSplit(
    block_columns=8, tile_rows=4, unroll=2, split_rows=16, apply_rows=8, range_rows=24, num_warps=4
)


def plan(config, channels, hw, *, last=False, residual=None, stats=True, affine=True):
    """The launches for [N, GROUPS * channels, hw] of float32."""
    lay = channels_last if last else lambda x: x
    x = lay(torch.randn(N, GROUPS * channels, hw))
    weight = torch.randn(GROUPS * channels) if affine else None
    statistics = [torch.empty(N, GROUPS) for _ in range(2)] if stats else [None, None]
    out = Forward(torch.empty_like(x), *statistics)
    other = None if residual is None else residual(torch.randn_like(x))
    sample = SampleShape(GROUPS, channels, hw, last)
    options = NormOptions("group_norm", GROUPS, activation="silu")
    call = make(
        GroupNormForwardCall,
        x=x,
        sample=sample,
        affine=AffineParameters(weight),
        options=options,
        residual=other,
        out=out,
    )
    return plan_forward(call, config)


def names(launches) -> list[str]:
    return [launch.kernel.__name__ for launch in launches]


def named(launch) -> dict:
    """Arguments and options by the kernel's own names for them."""
    return dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.options


def memories(launch) -> dict:
    """The memories of a launch's arrays by the kernel's names for them."""
    return {name: value.memory for name, value in named(launch).items() if isinstance(value, Array)}


@pytest.mark.parametrize(
    ("config", "last", "channels", "kernels"),
    [
        (GroupNormForwardResident(1, 1), False, 2, ["nchw_forward_resident"]),
        (GroupNormForwardCooperative(2, 1, 2, 1, 1), False, 16, ["nchw_forward_cooperative"]),
        (ForwardResidentBlock(2, 1, 1), True, 4, ["nhwc_forward_resident"]),
        (ForwardCooperativeBlock(2, 2, 1, 4, 1, 1), True, 4, ["nhwc_forward_cooperative"]),
        (
            ForwardSampleStream(1, 2, 3, 3),
            True,
            4,
            ["nhwc_forward_stream_moments", "nhwc_forward_stream_reduce", "nhwc_forward_stream_apply"],
        ),
    ],
    ids=lambda value: type(value).__name__ if "Forward" in type(value).__name__ else None,
)
def test_each_configuration_launches_its_own_kernels(config, last, channels, kernels):
    launches = plan(config, channels, 32, last=last)
    assert names(launches) == [f"group_norm_{kernel}_kernel" for kernel in kernels]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("otherwise", [False, True])
def test_the_tables_choose_and_a_residual_of_the_other_format_is_copied_first(last, otherwise, monkeypatch):
    chosen = ForwardSampleStream(1, 2, 3, 3) if last else GroupNormForwardSweep(16, 4)
    monkeypatch.setattr(group_norm_forward_launch, "list_candidates", lambda *_: (chosen,))
    to_other = (lambda x: x.contiguous()) if last else channels_last
    launches = plan(None, 4, 36, last=last, residual=to_other if otherwise else lambda x: x)
    copies = launches[:-3] if last else launches[:-1]
    assert names(copies) == ["group_norm_layout_copy_kernel"] * otherwise
    assert names(launches)[len(copies)] == (
        "group_norm_nhwc_forward_stream_moments_kernel" if last else "group_norm_nchw_forward_sweep_kernel"
    )
    first = named(launches[len(copies)])
    read = first["residual_ptr"]
    assert read.strides == first["x_ptr"].strides
    assert all(named(copy)["copy_ptr"] is read for copy in copies)


@pytest.mark.parametrize(
    ("sample", "dtype", "kernel"),
    [
        (SampleShape(32, 16, 64 * 64, False), torch.bfloat16, "cooperative"),
        (SampleShape(32, 8, 64 * 64, False), torch.float32, "cooperative"),
        # Seven programs would have a seventh more than there is.
        (SampleShape(32, 8, 56 * 56, False), torch.float32, "sweep"),
    ],
    ids=str,
)
def test_groups_too_large_for_registers_beside_a_residual_are_shared(sample, dtype, kernel, monkeypatch):
    monkeypatch.setattr("fusednorm.ops.group_norm.forward_choice.may_wait", lambda: True)
    x = torch.empty((1, sample.c, sample.hw), dtype=dtype, device="meta")
    given = {"x": x, "sample": sample, "out": Forward(x)}
    options = NormOptions("group_norm", sample.groups)
    plain = plan_forward(make(GroupNormForwardCall, **given, options=options))
    options = options._replace(activation="silu", dropout=0.1, seed=1)
    added = plan_forward(make(GroupNormForwardCall, **given, residual=x, options=options))
    assert names(plain) == ["group_norm_nchw_forward_resident_kernel"]
    assert names(added) == [f"group_norm_nchw_forward_{kernel}_kernel"]


def test_tiles_take_so_many_groups_each():
    (launch,) = plan(GroupNormForwardTile(4, 16, 4), 2, 20)
    assert names([launch]) == ["group_norm_nchw_forward_tile_kernel"]
    # Six groups of forty elements, which are ten vectors.
    assert launch.grid == (2,)
    assert (launch.options["ROWS"], launch.options["UNITS"], launch.options["VEC"]) == (4, 16, 4)
    assert launch.arguments[10:12] == (N * GROUPS, 10)


def test_a_sweep_is_a_program_a_group():
    (launch,) = plan(GroupNormForwardSweep(16, 4), 2, 20)
    assert names([launch]) == ["group_norm_nchw_forward_sweep_kernel"]
    assert launch.grid == (N * GROUPS,)
    assert launch.options["num_warps"] == 4
    assert launch.arguments[10] == 10


@pytest.mark.parametrize(("hw", "splits", "programs"), [(160, 2, 4), (164, 3, 4), (192, 3, 4), (196, 3, 5)])
def test_split_groups_are_covered_by_their_parts(hw, splits, programs):
    partial, apply = plan(SPLIT, 2, hw)
    assert names([partial, apply]) == [
        "group_norm_nchw_forward_split_moments_kernel",
        "group_norm_nchw_forward_split_apply_kernel",
    ]
    units = 2 * hw // 4
    assert (splits - 1) * 40 < units <= splits * 40
    assert (programs - 1) * 24 < units <= programs * 24
    assert partial.grid == (N * GROUPS * splits,)
    assert apply.grid == (N * GROUPS * programs,)
    parts = partial.arguments[2:5]
    assert {part.shape for part in parts} == {(N, splits, GROUPS)}
    assert {part.dtype for part in parts} == {"float32"}
    assert partial.arguments[0].memory == "x"
    assert partial.arguments[5:] == (units, GROUPS, 2, splits, 40)
    assert all(read is written for read, written in zip(apply.arguments[8:11], parts, strict=True))
    assert apply.options["BLOCK_SPLITS"] == {2: 2, 3: 4}[splits]
    assert named(apply)["splits"] == splits


@pytest.mark.parametrize(("channels", "hw", "wide"), [(1, WIDE_GROUP - 4, False), (1, WIDE_GROUP, True)])
def test_long_groups_are_indexed_with_more_bits(channels, hw, wide):
    whole = GroupNormForwardSplit(tile_vectors=2**20, split_vectors=2**28, program_vectors=2**28, num_warps=4)
    x = torch.empty(1).expand(1, channels, hw)
    out = Forward(x, None, None)
    launches = plan_forward(
        make(
            GroupNormForwardCall,
            x=x,
            sample=SampleShape(1, channels, hw, False),
            options=NormOptions("group_norm", 1),
            out=out,
        ),
        whole,
    )
    assert [launch.options["WIDE"] for launch in launches] == [wide, wide]


@pytest.mark.parametrize(
    ("channels", "hw", "splits", "runs", "blocks", "even"),
    [(4, 32, 2, 2, 1, True), (4, 33, 3, 2, 1, True), (8, 48, 3, 2, 2, True), (6, 49, 4, 3, 2, False)],
)
def test_columns_are_covered_by_splits_runs_and_blocks(channels, hw, splits, runs, blocks, even):
    launches = plan(COLUMNS, channels, hw, last=True)
    assert names(launches) == [
        "group_norm_nhwc_forward_columns_moments_kernel",
        "group_norm_reduce_moments_kernel",
        "group_norm_nhwc_forward_columns_apply_kernel",
    ]
    stats, reduce, apply = launches
    assert stats.grid == (N * splits * blocks,)
    assert reduce.grid == (N * GROUPS,)
    assert apply.grid == (N * runs * blocks,)
    assert {launch.options["EVEN"] for launch in (stats, apply)} == {even}
    assert {launch.options["VEC"] * launch.options["CV"] for launch in (stats, apply)} == {8}
    assert stats.arguments[2].shape == (N, splits, GROUPS * channels)
    assert stats.arguments[5:] == (hw, GROUPS * channels // 4, splits, 16, blocks)
    assert memories(reduce)["mean_ptr"] == "mean"
    assert memories(reduce)["rstd_ptr"] == "rstd"
    assert reduce.arguments[6:] == (GROUPS, channels, splits, 16, hw, 1e-5)
    assert (stats.options["ROWS"], stats.options["UNROLL"], apply.options["ROWS"]) == (4, 2, 8)
    assert memories(apply)["mean_ptr"] == "mean"
    assert memories(apply)["rest_ptr"] is memories(reduce)["rest_ptr"]
    assert memories(apply)["rstd_ptr"] == "rstd"


@pytest.mark.parametrize("given", ["mean", "rstd", None])
def test_statistics_that_nobody_wants_are_the_launches_own(given):
    x = channels_last(torch.randn(N, 8, 36))
    wanted = {given: torch.empty(N, GROUPS)} if given else {}
    out = Forward(torch.empty_like(x), **wanted)
    sample = SampleShape(GROUPS, 4, 36, True)
    _, reduce, apply = plan_forward(
        make(GroupNormForwardCall, x=x, sample=sample, options=NormOptions("group_norm", GROUPS), out=out), COLUMNS
    )
    own = [named(reduce)[name] for name in ("mean_ptr", "rest_ptr", "rstd_ptr")]
    assert [each.shape for each in own] == [(N, GROUPS)] * 3
    assert all(isinstance(each.memory, Workspace) for each in own)
    assert all(read is written for read, written in zip(apply.arguments[8:11], own, strict=True))


@pytest.mark.parametrize("last", [False, True])
def test_statistics_alone_fill_mean_and_rstd(last):
    x = torch.randn(N, 8, 36)
    x = channels_last(x) if last else x
    mean, rstd = torch.empty(N, GROUPS), torch.empty(N, GROUPS)
    x, mean, rstd = map(describe_as_array, ("x", "mean", "rstd"), (x, mean, rstd))
    launches = plan_statistics(x, SampleShape(GROUPS, 4, 36, last), 1e-5, None, mean, rstd)
    partial, reduce = launches
    assert names(launches)[1] == "group_norm_reduce_moments_kernel"
    assert reduce.grid == (N * GROUPS,)
    assert all(read is written for read, written in zip(reduce.arguments, partial.arguments[2:5], strict=False))
    assert memories(reduce)["mean_ptr"] == "mean"
    assert named(reduce)["rest_ptr"] is None
    assert memories(reduce)["rstd_ptr"] == "rstd"
    group_columns, splits, split_length, column_length, eps = reduce.arguments[7:]
    assert (group_columns, column_length) == ((4, 36) if last else (1, 4 * 36))
    assert (splits - 1) * split_length < column_length <= splits * split_length
    assert eps == 1e-5


@pytest.mark.parametrize(
    ("splits", "columns", "block_splits", "block_columns"),
    [(1, 1, 1, 1), (3, 5, 4, 8), (10**6, 1, REDUCE_BLOCK, 1), (10**6, 100, REDUCE_BLOCK // 64, 64), (2, 64, 2, 64)],
)
def test_reductions_take_as_wide_a_tile_as_fits(splits, columns, block_splits, block_columns):
    assert choose_reduction_tile(splits, columns) == {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": REDUCE_NUM_WARPS,
    }
