"""Parallel compilation of the kernels of one call, in threads of this process.

A call with several kernels would otherwise compile them one after another.  Triton's compiler holds Python's lock
while it processes a kernel's source, for a fifth to a half of its time, but not while it generates machine code.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fusednorm.devices.device import Gpu
from fusednorm.launch.absent import launches_for
from fusednorm.warm.calls import distinct, warm
from fusednorm.warm.driver import build_launcher


def compile_at_once(gpu: Gpu, call: Callable[[], object]) -> None:
    """Compile the kernels that `call` on meta tensors would launch on `gpu`, this process's GPU; a call at a time.

    A single kernel is not compiled here, but by the call that needs it.  The current device is the first.

    Raises:
        KernelInputError: the call raises it.
    """
    with launches_for(gpu) as noted:
        call()
        kernels = list(distinct(noted))
    if len(kernels) > 1:
        with ThreadPoolExecutor(len(kernels)) as threads:
            list(threads.map(lambda launch: build_launcher(warm(launch)), kernels))
