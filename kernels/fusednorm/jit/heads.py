"""Rows that are the heads of tokens: which of them a program takes, where they lie, whose parameters they have.

HEADS says how a pass over x [tokens, heads, cols] goes; a row's number is token * heads + head in each.

- "none": there are no heads, a token is a row; rows lie one stride apart.
- "shared": a token's heads lie one after another, tokens one stride apart; parameters [cols].
- "own": they lie as for "shared"; parameters [heads, cols].
- "own_uniform": all rows lie one stride apart, whichever their token; parameters [heads, cols].

A program keeps to one head, and the grid's second axis counts heads.  Without heads these functions cost nothing:
they return constants and what they were given.  Each return has a branch of its own: Triton compiles what follows a
branch that returns, and wants its type to be that of the other.
"""

import triton
import triton.language as tl


@triton.jit
def programs_of_head(HEADS: tl.constexpr):
    """This program's number among those of its head, how many they are, its head, and the number of heads."""
    if HEADS == "none":
        return tl.program_id(0), tl.num_programs(0), 0, 1
    else:
        # Programs that start together take the heads of the same tokens, which lie together in memory.
        heads = tl.num_programs(1)
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        return place // heads, tl.num_programs(0), place % heads, heads


@triton.jit
def row_of_token(token, head, heads, HEADS: tl.constexpr):
    """The number of a token's row of this head; `token` is int64."""
    if HEADS == "none":
        return token
    else:
        return token * heads + head


@triton.jit
def row_start(token, row, head, stride, cols, HEADS: tl.constexpr):
    """Elements from the start of a tensor to its rows; `stride` int64 between tokens, or else between rows."""
    if HEADS == "shared" or HEADS == "own":
        return token * stride + head.to(tl.int64) * cols
    else:
        return row * stride


@triton.jit
def parameter_start(head, cols, HEADS: tl.constexpr):
    """Elements from the start of weight and bias to those of this head."""
    if HEADS == "own" or HEADS == "own_uniform":
        return head.to(tl.int64) * cols
    else:
        return 0
