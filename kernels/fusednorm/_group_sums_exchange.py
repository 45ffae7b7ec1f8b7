"""Programs that share several groups tell one another two sums a group, while all of them run.

Two steps, since a block of columns holds many groups and a group many contributors: each program posts its part of
every group that it touches; one program for each group, its leader, collects the parts and posts their total; and
whoever touches the group collects that.  For cooperative launches alone; tags, the header and the last program's
duty are those of `_exchange`.

A slot is PAIR_WORDS 8-byte words, a float32 and the tag of its turn in each, written and read whole.  A group has a
slot for its total and one for each contributor behind it.  Turns take turns in DEPTH sets of slots, a power of two.
A program that collects the totals of turn n - LAG before it posts its parts of turn n needs DEPTH >= LAG: the
leader had then read the parts of turn n - LAG; and before it posts a total anew, all contributors have posted parts
of the same turn.
"""

import triton
import triton.language as tl

from fusednorm._exchange import HEADER_WORDS

PAIR_WORDS = tl.constexpr(2)

_POST = """{
.reg .pred writer;
.reg .b64 word_a, word_b;
setp.ne.s32 writer, $2, 0;
mov.b64 word_a, {$3, $5};
mov.b64 word_b, {$4, $5};
@writer st.relaxed.gpu.global.v2.b64 [$1], {word_a, word_b};
mov.u32 $0, 0;
}"""

# After some 20 s it traps: a failed launch rather than a device that hangs.
_COLLECT = """{
.reg .pred waiting, lost;
.reg .b32 tag_a, tag_b, polls;
.reg .b64 word_a, word_b;
mov.u32 polls, 0;
again:
ld.relaxed.gpu.global.v2.b64 {word_a, word_b}, [$2];
mov.b64 {$0, tag_a}, word_a;
mov.b64 {$1, tag_b}, word_b;
xor.b32 tag_a, tag_a, $3;
xor.b32 tag_b, tag_b, $3;
or.b32 tag_a, tag_a, tag_b;
add.u32 polls, polls, 1;
setp.gt.u32 lost, polls, 0x2000000;
@lost trap;
setp.ne.u32 waiting, tag_a, 0;
@waiting bra again;
}"""
POST_PAIRS: tl.constexpr = tl.constexpr(_POST)
COLLECT_PAIRS: tl.constexpr = tl.constexpr(_COLLECT)


@triton.jit
def slots_of_group(mailbox_ptr, team, tag, group, team_groups, contributors, DEPTH: tl.constexpr):
    """Where a group's total is posted in the turn `tag`; its contributors' parts follow, PAIR_WORDS each."""
    turn = (tag & (DEPTH - 1)).to(tl.int32)
    return (
        mailbox_ptr
        + HEADER_WORDS
        + ((team * DEPTH + turn) * team_groups + group) * ((contributors + 1) * PAIR_WORDS)
    )


@triton.jit
def post_pairs(slot_ptrs, wanted, tag, a, b):
    """Post a and b to each slot of a tile where `wanted`; threads that hold copies of an element write the same."""
    tl.inline_asm_elementwise(
        POST_PAIRS,
        "=r,l,r,r,r,r",
        [slot_ptrs.to(tl.int64), wanted.to(tl.int32), a, b, tag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect_pairs(slot_ptrs, tag):
    """What was posted to each slot of a tile in the turn `tag`, two float32 tiles; waits until all is there."""
    return tl.inline_asm_elementwise(
        COLLECT_PAIRS,
        "=&r,=&r,l,r",
        [slot_ptrs.to(tl.int64), tag],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
