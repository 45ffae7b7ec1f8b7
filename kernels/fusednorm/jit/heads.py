"""Rows that are heads of tokens: the rows of a program, their addresses, and the addresses of their parameters.

HEADS is the layout of x [tokens, heads, cols]; the number of a row is token * heads + head in every layout.

- "none": no heads; each token is one row, and a constant stride separates rows.
- "shared": the heads of a token are contiguous, and a constant stride separates tokens; parameters are [cols].
- "own": the layout of "shared"; parameters are [heads, cols].
- "own_uniform": a constant stride separates all rows, also those of different tokens; parameters are [heads, cols].
- "samples": a head is a sample, x is [samples, tokens, cols] in memory, and the number of a row is sample * tokens
  + token.  A constant stride separates all rows; weight and bias are [cols], scale, shift and gate [samples, cols].

A program processes rows of one head only.  The grid's second axis is the head; for "samples", of which there may be
more than an axis has, the grid has one axis.  Without heads these functions cost nothing: they return constants or
their arguments.  Every return stands in a branch: Triton also compiles the code after a branch that returns, and
requires both to return the same type.
"""

import triton
import triton.language as tl


@triton.jit
def locate_program_among_heads(samples, HEADS: tl.constexpr):
    """Compute this program's head, and its index among the programs of that head.

    Returns the index, the number of programs of a head, the head, and the number of heads.  HEADS is the
    memory layout of heads, "none" without heads.  `samples`, the number of samples, is used for "samples" only.
    """
    if HEADS == "none":
        return tl.program_id(0), tl.num_programs(0), 0, 1
    elif HEADS == "samples":
        programs = tl.num_programs(0) // samples
        return tl.program_id(0) % programs, programs, tl.program_id(0) // programs, samples
    else:
        # Programs that start together process the heads of the same tokens, which are adjacent in memory.
        heads = tl.num_programs(1)
        index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        return index // heads, tl.num_programs(0), index % heads, heads


@triton.jit
def compute_row_index(token, head, tokens, heads, HEADS: tl.constexpr):
    """Compute the index of the row of one token and head; `token` is int64.

    HEADS is the memory layout of heads; with "none", a token is one row.  `tokens`, the number of tokens of a
    sample, is used for "samples" only.
    """
    if HEADS == "none":
        return token
    elif HEADS == "samples":
        return head.to(tl.int64) * tokens + token
    else:
        return token * heads + head


@triton.jit
def compute_row_offset(token, row, head, stride, cols, HEADS: tl.constexpr):
    """Compute the offset of a row in x, in elements.  HEADS is the memory layout of heads.

    `stride` (int64) is between tokens for "shared" and "own", else between rows.
    """
    if HEADS == "shared" or HEADS == "own":
        return token * stride + head.to(tl.int64) * cols
    else:
        return row * stride


@triton.jit
def compute_modulation_offset(head, units, VEC: tl.constexpr, HEADS: tl.constexpr):
    """Compute the offset of this sample's scale, shift and gate in elements.

    Samples are `units` * VEC elements apart.
    """
    if HEADS == "samples":
        return head.to(tl.int64) * (units * VEC)
    else:
        return 0


@triton.jit
def compute_parameter_offset(head, cols, HEADS: tl.constexpr):
    """Compute the offset of this head's parameters in weight and bias, in elements.

    The offset is 0 if heads share parameters or x has no heads; HEADS is the memory layout of heads.
    """
    if HEADS == "own" or HEADS == "own_uniform":
        return head.to(tl.int64) * cols
    else:
        return 0
