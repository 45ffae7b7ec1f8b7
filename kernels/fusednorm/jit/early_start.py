"""Kernels of one pass that start before the one before them ends (programmatic dependent launch).

From compute capability 9.0 on, a launch with `launch_pdl` starts as soon as every program of the kernel before has
said `let_next_start` or ended.  What it does before `await_previous` must neither read what that kernel writes nor
write what it reads; after it, all is there that the kernels before wrote, for each of them waits in its turn.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Said first in every program of a kernel that another one follows."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote can be read."""
    if EARLY:
        gdc_wait()
