"""The launches of a GroupNorm backward pass: a function for each algorithm, from checked tensors."""

from torch import Tensor

from fusednorm.checks import Epilogue
from fusednorm.device import multiprocessor_count
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import Launch, can_prefetch, dropout_arguments, mailbox, resident_options
from fusednorm.ops.group_norm import backward_choice as group_norm_backward_launch
from fusednorm.ops.group_norm import backward_configs as configs
from fusednorm.ops.group_norm.backward_call import BackwardCall
from fusednorm.ops.group_norm.backward_reduce_plan import fold_parameters
from fusednorm.ops.group_norm.backward_split_plan import columns_launches, split_launches
from fusednorm.ops.group_norm.channels_last.backward.cooperative import group_norm_nhwc_backward_shared_kernel
from fusednorm.ops.group_norm.channels_last.backward_stream_plan import stream_launches
from fusednorm.ops.group_norm.contiguous.backward.cooperative import group_norm_nchw_backward_shared_kernel
from fusednorm.ops.group_norm.contiguous.backward.tile import group_norm_nchw_backward_tile_kernel
from fusednorm.ops.group_norm.sample import Sample
from fusednorm.policy.waiting import may_wait
from fusednorm.results import Backward


def plan_backward(
    dy: Tensor,
    x: Tensor,
    sample: Sample,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    dresidual_out: Tensor | None,
    epilogue: Epilogue,
    out: Backward,
    config: configs.Backward | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> list[Launch]:
    """The launches of a backward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = BackwardCall(
        dy, x, sample, weight, bias, eps, mean, rstd, residual, dresidual_out, epilogue, out, scale, shift
    )
    if config is None:
        if any(map(call.lies_otherwise, (dy, residual, dresidual_out))):
            config = group_norm_backward_launch.split_backward(sample, x.element_size())
        else:
            multiprocessors = multiprocessor_count(x.device)
            config = group_norm_backward_launch.choose_backward(
                sample, x.element_size(), multiprocessors, may_wait()
            )
    match config:
        case configs.BackwardTile() as tile:
            return _tile(call, tile)
        case configs.BackwardShared() as shared:
            return _shared(call, shared)
        case configs.BackwardBlocks() as blocks:
            return _blocks(call, blocks)
        case configs.BackwardSplit() as split:
            return split_launches(call, split)
        case configs.BackwardColumns() as columns:
            return columns_launches(call, columns)
        case configs.BackwardStream() as stream:
            return stream_launches(call, stream)


def _tile(call: BackwardCall, config: configs.BackwardTile) -> list[Launch]:
    vec, sample = call.channel_vec, call.sample
    rows = call.n * sample.groups
    parts = call.wanted_parts(1)
    arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, call.out.dx, *parts,
        rows, sample.hw // vec, sample.groups, sample.channels, call.scale_stride, call.eps,
        *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "ROWS": config.rows,
        "CHANNELS": config.channels,
        "POSITIONS": config.positions,
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **call.gradient_options,
    }
    grid = (cdiv(rows, config.rows),)
    return [
        Launch(group_norm_nchw_backward_tile_kernel, grid, arguments, options),
        *fold_parameters(call, parts, 1),
    ]


def _shared(call: BackwardCall, config: configs.BackwardShared) -> list[Launch]:
    call, launches = call.with_statistics()
    sample, itemsize = call.sample, call.x.element_size()
    vec = call.channel_vec
    members = config.members(sample, itemsize)
    parts = cdiv(sample.hw, config.part_positions(itemsize))
    resident = multiprocessor_count(call.x.device) * config.programs_per_sm
    rows = call.n * sample.groups
    # A team that is not resident is refused by the device.
    teams = max(1, min(rows, resident // members))
    depth = next_power_of_2(2 * cdiv(config.lag, config.pieces))
    partial = call.wanted_parts(parts)
    arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, call.out.dx, *partial,
        mailbox(call.x.device, depth * teams * members),
        rows, members, parts, sample.hw // vec, sample.groups, sample.channels, call.scale_stride,
        *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "CHANNELS": config.channels,
        "LANES": 32 * config.num_warps,
        "GROUP": 16 // itemsize,
        "CHUNKS": config.chunks,
        "PIECES": config.pieces,
        "EVEN": sample.hw % config.part_positions(itemsize) == 0 and sample.channels % config.channels == 0,
        "SLOTS": next_power_of_2(members),
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead if can_prefetch(vec, call.x, call.dy) else 0,
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **resident_options(config),
        **call.gradient_options,
    }
    return [
        *launches,
        Launch(group_norm_nchw_backward_shared_kernel, (teams * members,), arguments, options),
        *fold_parameters(call, partial, parts),
    ]


def _blocks(call: BackwardCall, config: configs.BackwardBlocks) -> list[Launch]:
    call, launches = call.with_statistics()
    sample, itemsize = call.sample, call.x.element_size()
    group = 16 // itemsize
    splits, members = config.splits(sample, itemsize), config.members(sample, itemsize)
    blocks = config.bundle_blocks(sample)
    bundle_groups = min(blocks * config.columns, sample.c) // sample.channels
    bundles = cdiv(sample.groups, bundle_groups)
    units = call.n * bundles
    resident = multiprocessor_count(call.x.device) * config.programs_per_sm
    teams = max(1, min(units, resident // members))
    # Then no other block has columns of its group.
    direct = config.columns == sample.channels
    depth = next_power_of_2((2 if direct else 1) * cdiv(config.lag, config.pieces))
    overlap = min(blocks, configs.most_touched(config.columns, sample.channels))
    partial = call.wanted_parts(splits)
    pairs = teams * depth * bundle_groups * (splits * overlap + 1)
    arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, call.out.dx, *partial,
        mailbox(call.x.device, cdiv(pairs, 2)),
        units, members, splits, sample.hw, sample.c // group, sample.groups, sample.channels,
        bundles, bundle_groups, bundle_groups * sample.channels // group, blocks, config.columns // group,
        call.scale_stride, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    whole = config.columns // group == config.vectors(itemsize) and sample.c % (blocks * config.columns) == 0
    options = {
        "GROUP": group,
        "CV": config.vectors(itemsize),
        "LANES": 32 * config.num_warps,
        "CHUNKS": config.chunks,
        "PIECES": config.pieces,
        "EVEN": whole and sample.hw % config.slab_rows(itemsize) == 0,
        "LABELS": configs.most_touched(sample.channels, group),
        "SPAN": next_power_of_2(min(bundle_groups, configs.most_touched(sample.channels, config.columns))),
        "OVERLAP": overlap,
        "DIRECT": direct,
        "SLOTS": next_power_of_2(splits * overlap),
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead,
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **resident_options(config),
        **call.gradient_options,
    }
    return [
        *launches,
        Launch(group_norm_nhwc_backward_shared_kernel, (teams * members,), arguments, options),
        *fold_parameters(call, partial, splits),
    ]
