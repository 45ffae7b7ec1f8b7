"""Programs that share several groups tell one another two sums a group, while all of them run.

Two steps, since a block of columns holds many groups and a group many contributors: each program posts its part of
every group that it touches; one program for each group, its leader, collects the parts and posts their total; and
whoever touches the group collects that.  Where a group is all that its programs share, each collects the parts
itself, which spares a step.  For cooperative launches alone; tags, the header and the last program's duty are those
of `jit.exchange`.

Slots are those of `post_pairs`: one for a group's total and one for each contributor behind it.  Turns take turns
in DEPTH sets of slots, a power of two.  A program that collects the totals of turn n - LAG before it posts its
parts of turn n needs DEPTH >= LAG: the leader had then read the parts of turn n - LAG; and before it posts a total
anew, all contributors have posted parts of the same turn.  Without a leader it needs DEPTH >= 2 * LAG, as rounds
of `jit.exchange` do.
"""

import triton
import triton.language as tl

from fusednorm.jit.exchange import HEADER_WORDS, PAIR_WORDS, collect_pairs, post_pairs
from fusednorm.jit.reductions import total_pair


@triton.jit
def slots_of_group(exchange_ptr, team, tag, group, team_groups, contributors, DEPTH: tl.constexpr):
    """Where a group's total is posted in the turn `tag`; its contributors' parts follow, PAIR_WORDS each."""
    turn = (tag & (DEPTH - 1)).to(tl.int32)
    return (
        exchange_ptr
        + HEADER_WORDS
        + ((team * DEPTH + turn) * team_groups + group) * ((contributors + 1) * PAIR_WORDS)
    )


@triton.jit
def total_of_parts(total_ptr, tag, present, SLOTS: tl.constexpr, FAST: tl.constexpr):
    """Both sums of the parts behind `total_ptr`, of which `present` [SLOTS] exist, the first among them; waits."""
    slot = tl.where(present, tl.arange(0, SLOTS), 0)
    part_g, part_g_xhat = collect_pairs(total_ptr + PAIR_WORDS + slot * PAIR_WORDS, tag)
    return total_pair(tl.where(present, part_g, 0.0), tl.where(present, part_g_xhat, 0.0), FAST)


@triton.jit
def post_totals(
    exchange_ptr, team, tag, member, members, groups, team_groups, channels, block_columns, contributors,
    OVERLAP: tl.constexpr, SLOTS: tl.constexpr, DEPTH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add up, and post, the parts of every `members`th of the `groups` groups, of which `member` is the leader.

    A group has parts from each block of `block_columns` columns that it lies in, OVERLAP at most.
    """
    slot = tl.arange(0, SLOTS)
    for group in range(member, groups, members):
        blocks = ((group + 1) * channels - 1) // block_columns - group * channels // block_columns
        present = (slot < contributors) & (slot % OVERLAP <= blocks)
        total_ptr = slots_of_group(exchange_ptr, team, tag, group, team_groups, contributors, DEPTH)
        g, g_xhat = total_of_parts(total_ptr, tag, present, SLOTS, FAST)
        post_pairs(total_ptr, member >= 0, tag, g, g_xhat)
