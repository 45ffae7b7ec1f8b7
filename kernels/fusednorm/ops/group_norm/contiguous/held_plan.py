"""Launches of the forward passes of GroupNorm that keep x in registers or share its groups between programs."""

from dataclasses import replace

from fusednorm.device import INTERPRETED, multiprocessor_count
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import (
    Launch,
    can_prefetch,
    dropout_arguments,
    known_whole,
    known_whole_in_slabs,
    mailbox,
    registers_for,
    resident_options,
)
from fusednorm.ops.group_norm import forward_configs as configs
from fusednorm.ops.group_norm.channels_last.forward.cooperative import (
    group_norm_nhwc_held_kernel,
    group_norm_nhwc_shared_kernel,
)
from fusednorm.ops.group_norm.contiguous.forward.cooperative import group_norm_nchw_shared_kernel
from fusednorm.ops.group_norm.contiguous.forward.resident import group_norm_nchw_held_kernel
from fusednorm.ops.group_norm.forward_call import ForwardCall, epilogue_options
from fusednorm.ops.group_norm.forward_choice import with_room


def fitted(call: ForwardCall, config: configs.Forward) -> configs.Forward | None:
    """`config` with as few resident programs as what is fused leaves registers for; None where it leaves none."""
    sample, size = call.sample, call.x.element_size()
    held = size + (0 if call.residual is None else call.residual.element_size())
    extra = 48 if call.epilogue.dropout else 16 if call.epilogue.activation == "gelu" else 0
    multiprocessors = multiprocessor_count(call.x.device)
    match config:
        case configs.ForwardHeld():
            chunks = cdiv(sample.frame_length, config.block)
            return with_room(config, chunks * 8 * held, extra, multiprocessors, 1)
        case configs.ForwardShared():
            slabs = 1 if config.lag == 0 else 2
            members = config.members(sample)
            # Vectors in two channels take the parameters of both.
            extra += 48 if sample.hw * size % 16 else 0
            return with_room(config, slabs * config.chunks * 8 * held, extra, multiprocessors, members)
        case configs.ForwardBlock():
            tile = configs.block_tile(sample, config.block_groups, config.num_warps, size)
            chunks = cdiv(sample.hw, tile.rows)
            return with_room(config, chunks * tile.vec * held, extra, multiprocessors, 1)
        case configs.ForwardSharedBlock():
            tile = configs.block_tile(sample, config.block_groups, config.num_warps, size)
            slabs = 1 if config.lag == 0 else 2
            members = config.members(sample, size)
            return with_room(config, slabs * config.chunks * tile.vec * held, extra, multiprocessors, members)
        case _:
            return config


def _can_prefetch_groups(call: ForwardCall) -> bool:
    """Whether what is read of a group starts and ends at multiples of 16 bytes."""
    return can_prefetch(16 // call.x.element_size() if call.is_skewed else call.group_vec, call.x)


def held_launch(call: ForwardCall, config: configs.ForwardHeld) -> Launch:
    """A program for each group, or for each share of one."""
    rows, sample = call.n * call.sample.groups, call.sample
    multiprocessors = multiprocessor_count(call.x.device)
    writers = _writers(rows, config.writers, multiprocessors)
    chunks = cdiv(sample.frame_length, config.block)
    arguments = (
        *call.tensors, *call.statistics, writers, config.ahead_per_sm * multiprocessors if writers == 1 else 0,
        call.group_units, *piece_walk(call), call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        **_contiguous_options(call, config, chunks),
        "FULL": known_whole(sample.group_length, config.block, chunks, call.has_lane_a_thread),
        "SKEWED": call.is_skewed,
        "PREFETCH": _can_prefetch_groups(call),
        "PARAMETERS": parameters_mode(call, config.block, config.block * chunks),
        "SHARED": writers > 1,
        # Shared groups are few: a program has its multiprocessor to itself.
        "maxnreg": registers_for(replace(config, programs_per_sm=1) if writers > 1 else config),
        **epilogue_options(call.epilogue),
    }
    return Launch(group_norm_nchw_held_kernel, (rows * writers,), arguments, options)


def shared_launch(call: ForwardCall, config: configs.ForwardShared) -> Launch:
    """Persistent programs, `config.members` for each of as many groups as are under way."""
    rows, sample = call.n * call.sample.groups, call.sample
    slab = config.chunks * config.block
    members = config.members(sample)
    slots = next_power_of_2(members)
    depth = next_power_of_2(max(2, 2 * config.lag))
    programs = min(rows, multiprocessor_count(call.x.device) * config.programs_per_sm // members) * members
    arguments = (
        *call.tensors, *call.statistics, mailbox(call.x.device, depth * programs), rows, members,
        call.group_units, *piece_walk(call), call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        **_contiguous_options(call, config, config.chunks),
        "FULL": known_whole_in_slabs(sample.group_length, config.block, config.chunks, call.has_lane_a_thread),
        "LANE_A_THREAD": call.has_lane_a_thread,
        # A full tree of the compiler's; the interpreter goes from slot to slot.
        "EQUAL": sample.group_length == slab * slots and slots <= 32 * config.num_warps and not INTERPRETED,
        "SKEWED": call.is_skewed,
        "SLOTS": slots,
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead if _can_prefetch_groups(call) else 0,
        "PARAMETERS": parameters_mode(call, config.block, slab),
        **resident_options(config),
        **epilogue_options(call.epilogue),
    }
    return Launch(group_norm_nchw_shared_kernel, (programs,), arguments, options)


def block_launch(call: ForwardCall, config: configs.ForwardBlock) -> Launch:
    """A program for each block of columns of a sample, or for each share of one."""
    sample = call.sample
    blocks = cdiv(sample.groups, config.block_groups)
    units = call.n * blocks
    writers = _writers(units, config.writers, multiprocessor_count(call.x.device))
    tile = configs.block_tile(sample, config.block_groups, config.num_warps, call.x.element_size())
    arguments = (
        *call.tensors, *call.statistics, writers, sample.hw, sample.c // tile.vec, sample.groups, sample.channels,
        blocks, config.block_groups, call.eps, call.scale_stride, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        **block_options(call, config, tile),
        "CHUNKS": cdiv(sample.hw, tile.rows),
        "FULL": sample.hw // tile.rows,
        "SHARED": writers > 1,
        # Shared groups are few: a program has its multiprocessor to itself.
        "maxnreg": registers_for(replace(config, programs_per_sm=1) if writers > 1 else config),
        **epilogue_options(call.epilogue),
    }
    return Launch(group_norm_nhwc_held_kernel, (units * writers,), arguments, options)


def shared_block_launch(call: ForwardCall, config: configs.ForwardSharedBlock) -> Launch:
    """Persistent programs, `config.members` for each of as many blocks of columns as are under way."""
    sample = call.sample
    blocks = cdiv(sample.groups, config.block_groups)
    units = call.n * blocks
    tile = configs.block_tile(sample, config.block_groups, config.num_warps, call.x.element_size())
    members = config.members(sample, call.x.element_size())
    depth = next_power_of_2(max(2, 2 * config.lag))
    programs = min(units, multiprocessor_count(call.x.device) * config.programs_per_sm // members) * members
    options = {
        **block_options(call, config, tile),
        "CHUNKS": config.chunks,
        "FULL": config.chunks if sample.hw % (config.chunks * tile.rows) == 0 else 0,
        "SLOTS": next_power_of_2(members),
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": 0 if INTERPRETED else config.ahead,
        **resident_options(config),
        **epilogue_options(call.epilogue),
    }
    # A pair of words for each group of a block, where a slot of the mailbox is four.
    box = mailbox(call.x.device, -(-depth * programs * next_power_of_2(config.block_groups) // 2))
    arguments = (
        *call.tensors, *call.statistics, box, units, members, sample.hw, sample.c // tile.vec,
        sample.groups, sample.channels, blocks, config.block_groups, call.eps,
        call.scale_stride, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    return Launch(group_norm_nhwc_shared_kernel, (programs,), arguments, options)


def _writers(units: int, most: int, multiprocessors: int) -> int:
    """Programs that share the writing of a group or block; the bits do not depend on it."""
    writers = 1
    while writers < most and 2 * writers * units <= multiprocessors:
        writers *= 2
    return writers


def _contiguous_options(
    call: ForwardCall, config: configs.ForwardHeld | configs.ForwardShared, chunks: int
) -> dict[str, object]:
    return {
        "VEC": call.group_vec,
        "BLOCK": config.block,
        "CHUNKS": chunks,
        "GROUP": 16 // call.x.element_size(),
        "num_warps": config.num_warps,
    }


def piece_walk(call: ForwardCall) -> tuple[int, ...]:
    """`ForwardCall.walk` in 16 bytes, or in elements where these may be of two channels."""
    vector = 16 // call.x.element_size()
    return call.walk(vector if call.sample.hw % vector == 0 else 1)


def parameters_mode(call: ForwardCall, block: int, piece: int) -> str:
    """What has one channel and so one value of each parameter; or "two", which a vector has at most."""
    vector = 16 // call.x.element_size()
    for mode, length in (("piece", piece), ("chunk", block), ("vector", vector)):
        if call.sample.hw % length == 0:
            return mode
    return "two" if call.sample.hw > vector else "element"


def block_options(
    call: ForwardCall,
    config: configs.ForwardBlock | configs.ForwardSharedBlock,
    tile: configs.BlockTile,
) -> dict[str, object]:
    sample = call.sample
    columns = config.block_groups * sample.channels
    return {
        "VEC": tile.vec,
        "CV": tile.vectors,
        "ROWS": tile.rows,
        "EVEN": columns == tile.vectors * tile.vec and sample.c % columns == 0,
        "KEEP": tile.keep,
        "GROUPS": next_power_of_2(config.block_groups),
        "num_warps": config.num_warps,
    }
