"""Parallel compilation of the kernels of one call, in threads of this process.

A call with several kernels would otherwise compile them one after another.  Triton's compiler holds Python's lock
while it processes a kernel's source, for a fifth to a half of its time, but not while it generates machine code.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fusednorm.devices.device_properties import GpuModel
from fusednorm.launch.recorded_launches import recording_launches
from fusednorm.warm.absent_driver import build_launcher
from fusednorm.warm.warm_calls import compile_kernel, iterate_distinct_launches


def compile_in_parallel(gpu: GpuModel, call: Callable[[], object]) -> None:
    """Compile the kernels that `call` on meta tensors would launch on this process's GPU `gpu`; one call at a time.

    A single kernel is not compiled here, but by the call that needs it.  The current device is the first.

    Raises:
        KernelInputError: the call raises it.
    """
    with recording_launches(gpu) as noted:
        call()
        kernels = list(iterate_distinct_launches(noted))
    if len(kernels) > 1:
        with ThreadPoolExecutor(len(kernels)) as threads:
            list(threads.map(lambda launch: build_launcher(compile_kernel(launch)), kernels))
