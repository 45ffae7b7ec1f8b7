"""Prefetching of memory into L2."""

import triton
import triton.language as tl

FEW_PROGRAMS = tl.constexpr(132)
"""With at most this many programs in a launch, none hides another's latency, so each prefetches all it needs."""

_PREFETCH = """{
.reg .pred asker;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 asker, thread, 0;
@asker cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}"""
PREFETCH: tl.constexpr = tl.constexpr(_PREFETCH)


@triton.jit
def prefetch(ptr, count):
    """Start a prefetch of `count` elements from `ptr` on into L2; address and size are multiples of 16 bytes."""
    nbytes = count * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [ptr.to(tl.int64), nbytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_parameters(weight_ptr, bias_ptr, start, count):
    """Prefetch `count` elements of weight and of bias from `start` on into L2.  Either may be None."""
    if weight_ptr is not None:
        prefetch(weight_ptr + start, count)
    if bias_ptr is not None:
        prefetch(bias_ptr + start, count)


@triton.jit
def prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_size, residual_row_size, cols):
    """Prefetch into L2 the row of the program that is `ahead` programs later, if there is such a program.

    Each program has one row; `ahead` 0 prefetches none.
    """
    program = tl.program_id(0)
    if ahead > 0 and program + ahead < tl.num_programs(0):
        row = program.to(tl.int64) + ahead
        prefetch(x_ptr + row * x_row_size, cols)
        if residual_ptr is not None:
            prefetch(residual_ptr + row * residual_row_size, cols)


_TOUCH = """{
.reg .pred asker;
.reg .b32 start;
.reg .b64 line;
mov.u32 start, %tid.x;
shl.b32 start, start, 7;
setp.lt.u32 asker, start, $2;
cvt.u64.u32 line, start;
add.u64 line, line, $1;
@asker prefetch.global.L2 [line];
mov.u32 $0, 0;
}"""
TOUCH: tl.constexpr = tl.constexpr(_TOUCH)


@triton.jit
def prefetch_lines(ptr, count):
    """Prefetch into L2 the cache lines of `count` elements from `ptr` on, at most one line per thread.

    `ptr` may be any address.
    """
    nbytes = count * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(TOUCH, "=r,l,r", [ptr.to(tl.int64), nbytes], dtype=tl.int32, is_pure=False, pack=1)


_TOUCH_ROWS = """{
.reg .pred more;
.reg .b32 row, step;
.reg .b64 start, end;
mov.u32 row, %tid.x;
mov.u32 step, %ntid.x;
setp.lt.u32 more, row, $2;
next:
mad.wide.u32 start, row, $3, $1;
cvt.u64.u32 end, $4;
add.u64 end, end, start;
@more prefetch.global.L2 [start];
@more prefetch.global.L2 [end];
add.u32 row, row, step;
setp.lt.u32 more, row, $2;
@more bra next;
mov.u32 $0, 0;
}"""
TOUCH_ROWS: tl.constexpr = tl.constexpr(_TOUCH_ROWS)


@triton.jit
def prefetch_row_lines(ptr, rows, stride, width):
    """Prefetch into L2 the cache lines of `rows` rows.  A row has `width` elements; rows start `stride`
    elements apart.

    A row has at most 256 bytes.
    """
    SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        TOUCH_ROWS,
        "=&r,l,r,r,r",
        [ptr.to(tl.int64), rows, stride * SIZE, width * SIZE - 16],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
