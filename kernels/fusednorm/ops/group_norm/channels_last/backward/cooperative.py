"""Backward pass of channels-last samples whose groups several programs share; the kernel is in `bundles`."""

from dataclasses import dataclass
from math import gcd

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launches import Launch, make_cooperative_options
from fusednorm.launch.workspaces import get_exchange_buffer
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.channels_last.backward.bundles import group_norm_nhwc_backward_cooperative_kernel
from fusednorm.ops.group_norm.channels_last.column_blocks import count_max_overlaps
from fusednorm.ops.group_norm.gradient_reductions import plan_parameter_reductions
from fusednorm.ops.group_norm.sample_shape import MAX_OFFSET, SampleShape, can_stay_in_l2


@dataclass(frozen=True, slots=True)
class BackwardCooperativeBlock(GroupNormBackwardConfig):
    """Programs that share channels-last groups: a block of `columns` columns over a range of positions each.

    A range is `fragments` fragments, a fragment `chunks` tiles; a tile has one 16-byte vector of x per thread.
    Blocks with parts of the same group form a bundle.  `programs_per_sm`, `lag` and `ahead` are those of
    `GroupNormBackwardCooperative`.
    """

    columns: int
    chunks: int
    fragments: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    def count_vectors(self, itemsize: int) -> int:
        """Return the number of adjacent threads along the columns; some threads may have no column."""
        return next_power_of_2(self.columns * itemsize // 16)

    def count_tile_rows(self, itemsize: int) -> int:
        """Return the number of positions of a tile."""
        return 32 * self.num_warps // self.count_vectors(itemsize)

    def count_range_rows(self, itemsize: int) -> int:
        """Return the number of positions of a range."""
        return self.fragments * self.chunks * self.count_tile_rows(itemsize)

    def count_splits(self, sample: SampleShape, itemsize: int) -> int:
        """Return the number of ranges of a block."""
        return -(-sample.hw // self.count_range_rows(itemsize))

    def count_bundle_blocks(self, sample: SampleShape) -> int:
        """Return the number of blocks of a bundle: the fewest that consist of complete groups."""
        blocks = sample.group_channels // gcd(self.columns, sample.group_channels)
        return min(blocks, -(-sample.c // self.columns))

    def count_members(self, sample: SampleShape, itemsize: int) -> int:
        """Return the number of programs that share a bundle of blocks."""
        return self.count_splits(sample, itemsize) * self.count_bundle_blocks(sample)

    def can_run(self, sample: SampleShape, itemsize: int, multiprocessors: int) -> bool:
        """Return whether a bundle's members are resident together and L2 keeps a fragment for its second read."""
        programs = self.programs_per_sm * multiprocessors
        return (
            sample.c * itemsize % 16 == 0
            and self.count_members(sample, itemsize) <= programs
            and can_stay_in_l2(32 * self.num_warps, self.chunks * (self.fragments + self.lag), programs)
            and sample.hw < MAX_OFFSET
        )

    def compute_padded_width(self, sample: SampleShape, itemsize: int) -> int:
        """Compute the number of columns of the tiles of all blocks."""
        return -(-sample.c // self.columns) * self.count_vectors(itemsize) * (16 // itemsize)

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        sample, itemsize = call.sample, call.x.element_size()
        group = 16 // itemsize
        splits, members = self.count_splits(sample, itemsize), self.count_members(sample, itemsize)
        blocks = self.count_bundle_blocks(sample)
        bundle_groups = min(blocks * self.columns, sample.c) // sample.group_channels
        bundles = cdiv(sample.groups, bundle_groups)
        units = call.n * bundles
        resident = count_multiprocessors(call.x.device) * self.programs_per_sm
        teams = max(1, min(units, resident // members))
        # If so, no other block has columns of its group.
        direct = self.columns == sample.group_channels
        depth = next_power_of_2((2 if direct else 1) * cdiv(self.lag, self.fragments))
        overlap = min(blocks, count_max_overlaps(self.columns, sample.group_channels))
        partial = call.allocate_wanted_partials(splits)
        pairs = teams * depth * bundle_groups * (splits * overlap + 1)
        arguments = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, call.out.dx, *partial,
            get_exchange_buffer(call.x.device, cdiv(pairs, 2)),
            units, members, splits, sample.hw, sample.c // group, sample.groups, sample.group_channels,
            bundles, bundle_groups, bundle_groups * sample.group_channels // group, blocks, self.columns // group,
            call.affine.sample_stride, *call.options.dropout_arguments,
        )  # fmt: skip
        has_full_vectors = (
            self.columns // group == self.count_vectors(itemsize) and sample.c % (blocks * self.columns) == 0
        )
        options = {
            "GROUP": group,
            "CV": self.count_vectors(itemsize),
            "LANES": 32 * self.num_warps,
            "CHUNKS": self.chunks,
            "FRAGMENTS": self.fragments,
            "EVEN": has_full_vectors and sample.hw % self.count_range_rows(itemsize) == 0,
            "LABELS": count_max_overlaps(sample.group_channels, group),
            "SPAN": next_power_of_2(min(bundle_groups, count_max_overlaps(sample.group_channels, self.columns))),
            "OVERLAP": overlap,
            "DIRECT": direct,
            "SLOTS": next_power_of_2(splits * overlap),
            "DEPTH": depth,
            "LAG": self.lag,
            "AHEAD": self.ahead,
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **make_cooperative_options(self),
            **call.gradient_options,
        }
        return [
            Launch(group_norm_nhwc_backward_cooperative_kernel, (teams * members,), arguments, options),
            *plan_parameter_reductions(partial, call.affine, call.out, splits, call.can_start_early),
        ]
