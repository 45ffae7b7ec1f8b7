"""Exchange of three numbers for each row, through global memory, between the running programs that share the row.

Only for cooperative launches, in which all programs run at the same time: a program never waits for one that has
not started.  A slot of the exchange buffer has SLOT_WORDS 8-byte words; three of them hold a float32 and the tag of
its round.  A word is written and read as a whole, so that a reader that sees the tag also has the value, without a
fence.  Tags only increase: the last program of a launch stores the tag that it reached for the next launch, and
nothing has to be cleared.

Rounds use DEPTH sets of slots in turn; DEPTH is a power of two.  A program that collects round n - LAG before it
posts round n needs DEPTH >= 2 * LAG: the others have then posted round n - LAG, and therefore collected round
n - 2 * LAG, and may still read later rounds.  A program that posts a round and then collects it needs two sets.
"""

import triton
import triton.language as tl

HEADER_WORDS = tl.constexpr(2)
"""8-byte words before the slots: the tag that the last launch reached, and the number of finished programs."""

SLOT_WORDS = tl.constexpr(4)

PAIR_WORDS = tl.constexpr(2)
"""8-byte words of a slot of `post_pairs`; each holds a float32 and the tag of its round."""

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

# Traps after about 20 s, so that the launch fails instead of blocking the device.
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

_POST_TILE = """{
.reg .pred writer;
.reg .b64 word_a, word_b, word_c;
setp.ne.s32 writer, $2, 0;
mov.b64 word_a, {$3, $6};
mov.b64 word_b, {$4, $6};
mov.b64 word_c, {$5, $6};
@writer st.relaxed.gpu.global.v2.b64 [$1], {word_a, word_b};
@writer st.relaxed.gpu.global.b64 [$1+16], word_c;
mov.u32 $0, 0;
}"""

# One 16-byte load for a pair; it is repeated until both words have the tag.
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
POST_TILE: tl.constexpr = tl.constexpr(_POST_TILE)
POST_PAIR: tl.constexpr = tl.constexpr(_POST_PAIR)
COLLECT_PAIR: tl.constexpr = tl.constexpr(_COLLECT_PAIR)


@triton.jit
def load_first_tag(exchange_ptr):
    """Load the tag of this launch's first round."""
    return tl.load(exchange_ptr, volatile=True).to(tl.uint32) + 1


@triton.jit
def locate_slot(exchange_ptr, team, tag, member, members, DEPTH: tl.constexpr):
    """Compute the address in the exchange buffer to which a program posts its values in the round `tag`.

    The program is the `member`th of the `members` programs of a group, which exchange values.  `member` may
    be a tile; the result has its shape.
    """
    turn = (tag & (DEPTH - 1)).to(tl.int32)
    return exchange_ptr + HEADER_WORDS + ((team * DEPTH + turn) * members + member) * SLOT_WORDS


@triton.jit
def post_scalars(slot_ptr, tag, a, b, c):
    """Post the float32 scalars a, b and c to a slot, for the programs that exchange values with this one.

    All threads hold the scalars, and one thread writes them.  They are scalars because a tile would be
    written once for each register that holds a copy of it.
    """
    tl.inline_asm_elementwise(
        POST, "=r,l,r,r,r,r", [slot_ptr.to(tl.int64), a, b, c, tag], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def collect_slots(slot_ptrs, tag):
    """Wait until every slot of a 1-D tile has the values of the round `tag`, and return the values.

    Returns three float32 tiles of the slots' shape.  Use the results in 1-D reductions only: the compiler
    repeats the wait for every other layout that it needs.
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
def post_tile(slot_ptrs, mask, tag, a, b, c):
    """Post the tiles a, b and c.  Each slot where `mask` is true gets one element of each tile.

    Threads that hold copies of an element write equal values.
    """
    tl.inline_asm_elementwise(
        POST_TILE,
        "=r,l,r,r,r,r,r",
        [slot_ptrs.to(tl.int64), mask.to(tl.int32), a, b, c, tag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect_tile(slot_ptrs, tag):
    """Wait until every slot of a tile of any rank has the values of the round `tag`, and return the values.

    Returns three float32 tiles of the slots' shape.  The loop runs once.  The compiler keeps the results of
    a loop; without the loop, it would repeat the wait for every layout in which the results are used.
    """
    a = tl.zeros(slot_ptrs.shape, tl.float32)
    b = tl.zeros(slot_ptrs.shape, tl.float32)
    c = tl.zeros(slot_ptrs.shape, tl.float32)
    turn = tag
    while turn == tag:
        a, b, c = collect_slots(slot_ptrs, tag)
        turn += 1
    return a, b, c


@triton.jit
def post_pairs(slot_ptrs, mask, tag, a, b):
    """Post the tiles a and b.  Each slot where `mask` is true gets one element of each tile.

    Threads that hold copies of an element write equal values.
    """
    tl.inline_asm_elementwise(
        POST_PAIR,
        "=r,l,r,r,r,r",
        [slot_ptrs.to(tl.int64), mask.to(tl.int32), a, b, tag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect_pairs(slot_ptrs, tag):
    """Wait until `post_pairs` has posted to every slot of a tile in the round `tag`, and return the pairs.

    Returns two float32 tiles of the slots' shape.  The loop is that of `collect_tile`.
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
def end_exchange(exchange_ptr, last_tag):
    """Count this program as finished.  The last program of the launch stores `last_tag` for the next launch.

    `last_tag` is the tag of the launch's last round, equal in all programs.  The next launch's tags are
    larger, so that no slot has to be cleared.
    """
    # Relaxed is sufficient: this launch has already read the tag, and the next launch starts after this one has
    # ended.
    finished = tl.atomic_add(exchange_ptr + 1, 1, sem="relaxed")
    if finished == tl.num_programs(0) - 1:
        tl.store(exchange_ptr + 1, 0)
        tl.store(exchange_ptr, last_tag.to(tl.int64))
