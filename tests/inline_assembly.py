"""Inline assembly of kernels as numpy computes it, for Triton's interpreter, which runs none.

`test_interpreter` compares each function with the instructions themselves on a GPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from fusednorm.jit import prefetch, program_exchange
from fusednorm.ops.group_norm.channels_last import column_blocks
from triton.runtime.interpreter import _interpreter as memory

from tests.cooperative_launch import current_launch

Array = np.ndarray[Any, Any]

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


def multiply(a: Array, b: Array) -> Array:
    """Round a * b."""
    return a * b


def widen_bfloat16(bits: Array) -> Array:
    """Convert bfloat16, which the interpreter has as bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def widen_float16(values: Array) -> Array:
    """Convert float16."""
    return values.astype(np.float32)


def reciprocal(x: Array) -> Array:
    """Divide 1 by x, where subnormal numbers are 0; the instruction may differ by 1 ulp."""
    return _flush(np.float32(1.0) / _flush(x))


def reciprocal_root(x: Array) -> Array:
    """Divide 1 by the square root of x, where subnormal numbers are 0; the relative error is up to 2^-22.9."""
    return np.float32(1.0) / np.sqrt(_flush(x))


def exp2(x: Array) -> Array:
    """Compute 2^x, where subnormal results are 0; the instruction may differ by 2 ulp."""
    return _flush(np.exp2(x))


def tanh(x: Array) -> Array:
    """Compute tanh(x); the instruction has a relative error of up to 2^-11."""
    return np.tanh(x)


def standardise(h: Array, mean: Array, rstd: Array, addend: Array) -> Array:
    """Compute (h - mean) * rstd + addend, rounded after the subtraction and at the end."""
    distance = h - mean
    # float64 holds the product exactly.  Its sum is rounded to odd, so that rounding it again is rounding it once.
    product, addend = distance.astype(np.float64) * rstd, addend.astype(np.float64)
    total = product + addend
    shared = total - product
    error = (product - (total - shared)) + (addend - shared)
    is_even = total.view(np.int64) & 1 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    inexact = ((error > 0) | (error < 0)) & is_even
    return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)


def _flush(x: Array) -> Array:
    """Replace subnormal numbers by zeros of the same sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0.0), x), x)


def post(slots: Array, *values_and_tag: Array) -> Array:
    """Write values to a slot, each in a word with the tag of the round."""
    return post_where(slots, np.ones(slots.shape, np.int32), *values_and_tag)


def post_where(slots: Array, wanted: Array, *values_and_tag: Array) -> Array:
    """Write values to each slot that is wanted."""
    *values, tag = values_and_tag
    for place, value in enumerate(values):
        words = value.view(np.uint32).astype(np.uint64) | tag.astype(np.uint64) << 32
        memory.store(_word(slots, place), words, wanted != 0)
    current_launch().note_progress()
    return np.zeros(slots.shape, np.int32)


def collect(slots: Array, tag: Array, count: int = 3) -> tuple[Array, ...]:
    """Wait until each slot has `count` values of the round `tag`."""
    everywhere, none = np.ones(slots.shape, np.bool_), np.zeros(slots.shape, np.uint64)
    while True:
        words = [memory.load(_word(slots, place), everywhere, none, np.dtype(np.uint64)) for place in range(count)]
        if all(np.array_equal(word >> 32, tag) for word in words):
            return tuple(word.astype(np.uint32).view(np.float32) for word in words)
        current_launch().pass_turn()


def collect_pair(slots: Array, tag: Array) -> tuple[Array, ...]:
    """Wait until each slot has two values of the round `tag`."""
    return collect(slots, tag, 2)


def _word(slots: Array, place: int) -> Array:
    return (slots + 8 * place).astype(np.uint64)


def do_nothing(*operands: Array) -> Array:
    """Take what has no result: it makes memory faster, or lets kernels overlap."""
    return np.zeros(np.shape(operands[0]) if operands else 1, np.int32)


COMPUTED: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
    "mul.rn.f32 $0, $1, $2;": multiply,
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": widen_bfloat16,
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }": widen_float16,
    "rcp.approx.ftz.f32 $0, $1;": reciprocal,
    "rsqrt.approx.ftz.f32 $0, $1;": reciprocal_root,
    "ex2.approx.ftz.f32 $0, $1;": exp2,
    "tanh.approx.f32 $0, $1;": tanh,
    "{ .reg .f32 d; sub.rn.f32 d, $1, $2; fma.rn.f32 $0, d, $3, $4; }": standardise,
    prefetch.PREFETCH.value: do_nothing,
    prefetch.TOUCH.value: do_nothing,
    prefetch.TOUCH_ROWS.value: do_nothing,
    column_blocks.ASK.value: do_nothing,
    program_exchange.POST.value: post,
    program_exchange.POST_TILE.value: post_where,
    program_exchange.POST_PAIR.value: post_where,
    program_exchange.COLLECT.value: collect,
    program_exchange.COLLECT_PAIR.value: collect_pair,
}
"""What computes each statement from its operands; keys are the statements of kernels, to the letter."""
