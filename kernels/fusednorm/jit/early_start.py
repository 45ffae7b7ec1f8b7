"""Kernels of one pass that start before the previous kernel ends (programmatic dependent launch).

From compute capability 9.0 on, a launch with `launch_pdl` starts as soon as every program of the previous kernel
has called `allow_next_launch` or ended.  Code before `await_previous_launch` must neither read memory that the
previous kernel writes nor write memory that it reads.  After `await_previous_launch` the writes of all earlier
kernels are visible, because each of these kernels waited for its own predecessor.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def allow_next_launch(EARLY: tl.constexpr):
    """Allow the next kernel to start; every program of a kernel that has a successor calls this first."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_previous_launch(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if EARLY:
        gdc_wait()
