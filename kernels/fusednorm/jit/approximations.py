"""Functions that the hardware approximates by one instruction, elementwise for float32 tiles of any shape.

They are inline assembly.  Triton compiles `tl.rsqrt` and `tl.exp2` to the same instructions, but by functions of
NVIDIA's device library: it would read and link that library for each kernel, which takes a quarter of the time in
which a small one is compiled.
"""

import triton
import triton.language as tl


@triton.jit
def approximate_reciprocal(x):
    """Compute 1 / x with an error of 1 ulp."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def approximate_rsqrt(x):
    """Compute 1 / sqrt(x) with a relative error of 2^-22.9."""
    return tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def approximate_exp2(x):
    """Compute 2^x with an error of 2 ulp."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def approximate_tanh(x):
    """Compute tanh(x) with a relative error of 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
