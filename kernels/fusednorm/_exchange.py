"""Programs that share a row exchange two numbers a row through device memory, while all of them run.

Only for cooperative launches, which start all programs or none: every program that is waited for is running.
A slot of the mailbox is two 8-byte words, each a float32 and the tag of its round, written and read as one; so
a reader that sees the tag has the value, and no fence is needed.  Tags grow for as long as a mailbox lives: the
last program of a launch leaves the tag that it reached for the next launch, and nothing needs to be cleared.
Slots alternate between odd and even rounds: a program writes round n only after it has read round n - 1 from
all others, who had then read round n - 2.
"""

import triton
import triton.language as tl

HEADER_WORDS = tl.constexpr(2)
"""8-byte words in front of the slots: the tag that the last launch reached, and programs that have left."""


@triton.constexpr_function
def _exchange_assembly(split):
    """PTX: one thread writes this program's slot; all read SPLIT slots of two words until every tag is there.

    Outputs: the SPLIT values a, then the SPLIT values b.  Inputs: the addresses of this program's slot and of the
    first, a, b, and the tag.  After some 20 s it traps: a failed launch rather than a device that hangs.
    """
    mine, first, a, b, tag = (f"${2 * split + i}" for i in range(5))
    loads = [f"ld.relaxed.gpu.global.v2.b64 {{word_a{i}, word_b{i}}}, [{first}+{16 * i}];" for i in range(split)]
    checks = [
        line
        for i in range(split)
        for letter, output in (("a", i), ("b", split + i))
        for line in (
            f"mov.b64 {{${output}, seen}}, word_{letter}{i};",
            f"xor.b32 seen, seen, {tag};",
            "or.b32 missing, missing, seen;",
        )
    ]
    return "\n".join(
        [
            "{",
            ".reg .pred writer, waiting, lost;",
            ".reg .b32 seen, missing, polls;",
            f".reg .b64 word_a<{split}>, word_b<{split}>;",
            "mov.u32 polls, %tid.x;",
            "setp.eq.u32 writer, polls, 0;",
            f"mov.b64 word_a0, {{{a}, {tag}}};",
            f"mov.b64 word_b0, {{{b}, {tag}}};",
            f"@writer st.relaxed.gpu.global.v2.b64 [{mine}], {{word_a0, word_b0}};",
            "mov.u32 polls, 0;",
            "again:",
            *loads,
            "mov.u32 missing, 0;",
            *checks,
            "add.u32 polls, polls, 1;",
            "setp.gt.u32 lost, polls, 0x2000000;",
            "@lost trap;",
            "setp.ne.u32 waiting, missing, 0;",
            "@waiting bra again;",
            "}",
        ]
    )


@triton.constexpr_function
def _exchange_constraints(split):
    return ",".join(["=&r"] * (2 * split) + ["l", "l", "r", "r", "r"])


@triton.constexpr_function
def _exchange_types(split):
    return (tl.float32,) * (2 * split)


@triton.jit
def first_tag(mailbox_ptr):
    """The tag of this launch's first round."""
    return tl.load(mailbox_ptr, volatile=True).to(tl.uint32) + 1


@triton.jit
def exchange(mailbox_ptr, group, member, tag, a, b, SPLIT: tl.constexpr):
    """The members' a and b, in the order of the members: two tuples of SPLIT float32 scalars.

    Scalars, for a tile would be exchanged once for every register that holds a copy of it.

    Args:
        mailbox_ptr: int64 workspace of the stream, see `launch.mailbox`.
        group: which row group this program works for; its members are the programs that exchange.
        member: this program's place among the SPLIT members.
        tag: uint32, the number of this round.
        a, b: float32, the same in every thread.
    """
    first = mailbox_ptr + HEADER_WORDS + (group * 2 + (tag & 1).to(tl.int32)) * (2 * SPLIT)
    mine = first + member * 2
    values = tl.inline_asm_elementwise(
        _exchange_assembly(SPLIT),
        _exchange_constraints(SPLIT),
        [mine.to(tl.int64), first.to(tl.int64), a, b, tag],
        dtype=_exchange_types(SPLIT),
        is_pure=False,
        pack=1,
    )
    return values[:SPLIT], values[SPLIT:]


@triton.jit
def leave(mailbox_ptr, last_tag):
    """The last program to leave hands the highest tag on; `last_tag` is the same number in every program."""
    left = tl.atomic_add(mailbox_ptr + 1, 1, sem="acq_rel")
    if left == tl.num_programs(0) - 1:
        tl.store(mailbox_ptr + 1, 0)
        tl.store(mailbox_ptr, last_tag.to(tl.int64))
