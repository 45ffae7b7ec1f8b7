"""Exchange of two sums per group between running programs that share several groups.

It has two steps, since a block of columns holds many groups and a group has many contributors.  Each program posts
its part of every group that it touches.  One program for each group, its leader, collects the parts and posts their
total, which all programs that touch the group collect.  If programs share a single group, each collects the parts
itself, which saves a step.  Only for cooperative launches; tags, the header and the last program's task are those
of `jit.program_exchange`.

Slots are those of `post_pairs`: one for a group's total, followed by one for each contributor.  Rounds use DEPTH
sets of slots in turn; DEPTH is a power of two.  A program that collects the totals of round n - LAG before it posts
its parts of round n needs DEPTH >= LAG: all warps of the leader have then read the parts of round n - LAG; and
before it posts another total in the same slot, all contributors have posted parts of that round.  Without a leader
it needs DEPTH >= 2 * LAG, as rounds of `jit.program_exchange` do.
"""

import triton
import triton.language as tl

from fusednorm.jit.program_exchange import HEADER_WORDS, PAIR_WORDS, collect_pairs, post_pairs
from fusednorm.jit.reductions import sum_pair_to_scalars


@triton.jit
def locate_group_total(exchange_ptr, team, tag, group, team_groups, contributors, DEPTH: tl.constexpr):
    """Compute the address in the exchange buffer to which a group's total is posted in the round `tag`.

    The slots for the parts of its `contributors` follow, PAIR_WORDS each.  `team` is the index of the
    programs that together process `team_groups` groups.
    """
    turn = (tag & (DEPTH - 1)).to(tl.int32)
    return (
        exchange_ptr
        + HEADER_WORDS
        + ((team * DEPTH + turn) * team_groups + group) * ((contributors + 1) * PAIR_WORDS)
    )


@triton.jit
def collect_and_sum_partials(total_ptr, tag, present, SLOTS: tl.constexpr):
    """Wait for all parts of a group's two sums from the programs that share the group, and return both sums as
    scalars.

    The parts are in the slots after `total_ptr`.  `present` [SLOTS] is the mask of slots that have a part;
    the first one has.
    """
    slot = tl.where(present, tl.arange(0, SLOTS), 0)
    part_g, part_g_xhat = collect_pairs(total_ptr + PAIR_WORDS + slot * PAIR_WORDS, tag)
    return sum_pair_to_scalars(tl.where(present, part_g, 0.0), tl.where(present, part_g_xhat, 0.0))


@triton.jit
def collect_and_post_totals(
    exchange_ptr, team, tag, member, members, groups, team_groups, channels, block_columns, contributors,
    OVERLAP: tl.constexpr, SLOTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Wait for all parts of the sums of each group that this program leads, add them up, and post the group's
    total.

    The leader of a group is the program that adds up the group's parts.  A program leads every `members`th
    of `groups`, from its own number `member` on.

    A group has parts from each block of `block_columns` columns that it overlaps, at most OVERLAP.
    """
    slot = tl.arange(0, SLOTS)
    for group in range(member, groups, members):
        blocks = ((group + 1) * channels - 1) // block_columns - group * channels // block_columns
        present = (slot < contributors) & (slot % OVERLAP <= blocks)
        total_ptr = locate_group_total(exchange_ptr, team, tag, group, team_groups, contributors, DEPTH)
        g, g_xhat = collect_and_sum_partials(total_ptr, tag, present, SLOTS)
        # Every warp waits for the parts itself.  Once a total is posted, contributors may replace their parts, for
        # which a slower warp would then wait forever.
        tl.debug_barrier()
        post_pairs(total_ptr, member >= 0, tag, g, g_xhat)
