"""Programs that share a row tell one another three numbers a row through device memory, while all of them run.

Only for cooperative launches, which start all programs or none: every program that is waited for is running.
A slot of the mailbox is SLOT_WORDS 8-byte words, a float32 and the tag of its round in each of three of them,
which are written and read whole; so a reader that sees the tag has the value, and no fence is needed.  Tags grow
for as long as a mailbox lives: the last program of a launch leaves the tag that it reached for the next launch,
and nothing needs to be cleared.

Rounds take turns in DEPTH sets of slots, a power of two.  A program that collects round n - LAG before it posts
round n needs DEPTH >= 2 * LAG: the others had then posted round n - LAG, so had collected round n - 2 * LAG, and
may still read the rounds after that.  One that posts a round and then collects it needs two sets.
"""

import triton
import triton.language as tl

HEADER_WORDS = tl.constexpr(2)
"""8-byte words in front of the slots: the tag that the last launch reached, and programs that have left."""

SLOT_WORDS = tl.constexpr(4)

PAIR_WORDS = tl.constexpr(2)
"""8-byte words of a slot of `post_pairs`, a float32 and the tag of its round in each."""

_POST = """{
.reg .pred writer;
.reg .b32 thread;
.reg .b64 word_a, word_b, word_c;
mov.u32 thread, %tid.x;
setp.eq.u32 writer, thread, 0;
mov.b64 word_a, {$2, $5};
mov.b64 word_b, {$3, $5};
mov.b64 word_c, {$4, $5};
@writer st.relaxed.gpu.global.v2.b64 [$1], {word_a, word_b};
@writer st.relaxed.gpu.global.b64 [$1+16], word_c;
mov.u32 $0, 0;
}"""

# After some 20 s it traps: a failed launch rather than a device that hangs.
_COLLECT = """{
.reg .pred waiting, lost;
.reg .b32 tag_a, tag_b, tag_c, polls;
.reg .b64 word_a, word_b, word_c;
mov.u32 polls, 0;
again:
ld.relaxed.gpu.global.v2.b64 {word_a, word_b}, [$3];
ld.relaxed.gpu.global.b64 word_c, [$3+16];
mov.b64 {$0, tag_a}, word_a;
mov.b64 {$1, tag_b}, word_b;
mov.b64 {$2, tag_c}, word_c;
xor.b32 tag_a, tag_a, $4;
xor.b32 tag_b, tag_b, $4;
xor.b32 tag_c, tag_c, $4;
or.b32 tag_a, tag_a, tag_b;
or.b32 tag_a, tag_a, tag_c;
add.u32 polls, polls, 1;
setp.gt.u32 lost, polls, 0x2000000;
@lost trap;
setp.ne.u32 waiting, tag_a, 0;
@waiting bra again;
}"""

_POST_PAIR = """{
.reg .pred writer;
.reg .b64 word_a, word_b;
setp.ne.s32 writer, $2, 0;
mov.b64 word_a, {$3, $5};
mov.b64 word_b, {$4, $5};
@writer st.relaxed.gpu.global.v2.b64 [$1], {word_a, word_b};
mov.u32 $0, 0;
}"""

# One 16-byte load for a pair: both words of it bear the tag or are asked for again.
_COLLECT_PAIR = """{
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
POST: tl.constexpr = tl.constexpr(_POST)
COLLECT: tl.constexpr = tl.constexpr(_COLLECT)
POST_PAIR: tl.constexpr = tl.constexpr(_POST_PAIR)
COLLECT_PAIR: tl.constexpr = tl.constexpr(_COLLECT_PAIR)


@triton.jit
def first_tag(mailbox_ptr):
    """The tag of this launch's first round."""
    return tl.load(mailbox_ptr, volatile=True).to(tl.uint32) + 1


@triton.jit
def slot_of(mailbox_ptr, group, tag, member, members, DEPTH: tl.constexpr):
    """Where a member of a group posts in the round `tag`; `member` may be a tile of numbers."""
    turn = (tag & (DEPTH - 1)).to(tl.int32)
    return mailbox_ptr + HEADER_WORDS + ((group * DEPTH + turn) * members + member) * SLOT_WORDS


@triton.jit
def post(slot_ptr, tag, a, b, c):
    """Tell the other members a, b and c, float32 scalars that every thread holds; one thread writes.

    Scalars, for a tile would be written once for every register that holds a copy of it.
    """
    tl.inline_asm_elementwise(
        POST, "=r,l,r,r,r,r", [slot_ptr.to(tl.int64), a, b, c, tag], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def collect(slot_ptrs, tag):
    """What was posted to each slot of a 1-D tile in the round `tag`, three float32 tiles; waits until all is there.

    The results are for 1-D reductions: the compiler repeats the waiting for every other layout that it needs.
    """
    return tl.inline_asm_elementwise(
        COLLECT,
        "=&r,=&r,=&r,l,r",
        [slot_ptrs.to(tl.int64), tag],
        dtype=(tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def pair_slot_of(mailbox_ptr, team, tag, member, members, pair, pairs, DEPTH: tl.constexpr):
    """Where a member of a team posts one of its `pairs` pairs in the round `tag`; tiles of numbers broadcast."""
    turn = (tag & (DEPTH - 1)).to(tl.int32)
    return mailbox_ptr + HEADER_WORDS + (((team * DEPTH + turn) * members + member) * pairs + pair) * PAIR_WORDS


@triton.jit
def post_pairs(slot_ptrs, wanted, tag, a, b):
    """Post a and b to each slot of a tile where `wanted`; threads that hold copies of an element write the same."""
    tl.inline_asm_elementwise(
        POST_PAIR,
        "=r,l,r,r,r,r",
        [slot_ptrs.to(tl.int64), wanted.to(tl.int32), a, b, tag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect_pairs(slot_ptrs, tag):
    """What `post_pairs` put into each slot of a tile in the round `tag`, two float32 tiles; waits for all of it.

    The loop runs once: what comes out of a loop is kept, where the compiler would else repeat the waiting for every
    layout in which the results are used.
    """
    a = tl.zeros(slot_ptrs.shape, tl.float32)
    b = tl.zeros(slot_ptrs.shape, tl.float32)
    turn = tag
    while turn == tag:
        a, b = tl.inline_asm_elementwise(
            COLLECT_PAIR,
            "=&r,=&r,l,r",
            [slot_ptrs.to(tl.int64), tag],
            dtype=(tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
        turn += 1
    return a, b


@triton.jit
def leave(mailbox_ptr, last_tag):
    """The last program to leave hands the highest tag on; `last_tag` is the same number in every program."""
    # Relaxed: what it must not overtake, reading the tag, is long done; the next launch waits for all of this one.
    left = tl.atomic_add(mailbox_ptr + 1, 1, sem="relaxed")
    if left == tl.num_programs(0) - 1:
        tl.store(mailbox_ptr + 1, 0)
        tl.store(mailbox_ptr, last_tag.to(tl.int64))
