"""Values on which configurations of both GroupNorm passes depend: a sample's shape, bounds, memory for sums."""

from dataclasses import dataclass
from math import gcd

from fusednorm.arguments.arrays import Array, new_workspace
from fusednorm.integers import next_power_of_2

MAX_PARTS = 65536
"""The target number of partial results per sample, so that their reduction is a small part of the work."""

WIDE_GROUP = 2**31
"""The number of elements from which offsets inside one contiguous group are 64-bit."""

L2_BYTES = 30 << 20
"""Bytes of x and dy that programs can process at once and find in L2 at the second read; an H200 has 60 MB."""

MAX_OFFSET = 2**31
"""The number of elements that 32-bit offsets can address."""


@dataclass(frozen=True, slots=True)
class SampleShape:
    """The shape of one sample of x and its memory layout, channels-last or contiguous.

    A sample has `groups` groups of `group_channels` channels; a channel has `hw` positions.
    """

    groups: int
    group_channels: int
    hw: int
    channels_last: bool

    @property
    def c(self) -> int:
        """Channels of all groups."""
        return self.groups * self.group_channels

    @property
    def group_length(self) -> int:
        """Elements of one group."""
        return self.group_channels * self.hw

    @property
    def aligned_group_length(self) -> int:
        """The most elements of a contiguous group with those before it that share its first 16 bytes."""
        return self.group_length + (7 if self.group_length % 8 else 0)


def compute_access_width(itemsize: int, *sizes: int) -> int:
    """Compute the elements of one access: 16 bytes of x, or the largest smaller power of two dividing all sizes."""
    return gcd(16 // itemsize, *sizes)


def compute_max_splits(columns: int) -> int:
    """Compute the most parts into which each column of a sample is divided."""
    return min(512, max(32, MAX_PARTS // columns))


def choose_block_columns(sample: SampleShape, itemsize: int) -> int:
    """Choose the number of columns of a block: the power of two with which C needs the least padding.

    A block spans 32 to 256 bytes; among equals, the widest is chosen.

    If C has fewer than 32 bytes, the block has the size of C, rounded up to a power of two.
    """
    vec = compute_access_width(itemsize, sample.c)
    widths = [max(vec, size // itemsize) for size in (256, 128, 64, 32)]
    if sample.c * itemsize < 32:
        widths = [next_power_of_2(sample.c)]
    return min(widths, key=lambda width: (-(-sample.c // width) * width, -width))


def can_stay_in_l2(threads: int, tiles: int, programs: int) -> bool:
    """Return whether L2 can hold the tiles that programs read a second time, `tiles` tiles of x and of dy for
    each program.

    These are the tiles that a program read last.  A tile has 16 bytes per thread.
    """
    return 2 * 16 * threads * tiles * programs <= L2_BYTES


def allocate_statistics(x: Array, sample: SampleShape) -> tuple[Array, Array]:
    """Allocate memory for two float32 values of each group, [N, groups]."""
    shape = (x.shape[0], sample.groups)
    return new_workspace(x, *shape), new_workspace(x, *shape)


def allocate_triple(like: Array, *shape: int) -> tuple[Array, Array, Array]:
    """Allocate three adjacent float32 arrays of the given shape on `like`'s device, for moments of parts."""
    mean, rest, square = new_workspace(like, 3, *shape).unbind()
    return mean, rest, square


def allocate_pair(like: Array, *shape: int) -> tuple[Array, Array]:
    """Allocate memory for two adjacent float32 arrays of the given shape on the device of `like`."""
    first, second = new_workspace(like, 2, *shape).unbind()
    return first, second
