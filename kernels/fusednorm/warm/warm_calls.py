"""The calls whose kernels are compiled in advance for a row length, and the compilation of a call's kernels.

The kernels of one call are compiled in parallel, in threads of this process; the call itself would compile them
one after another.  Triton's compiler holds Python's lock while it processes a kernel's source, for a fifth to a
half of its time, but not while it generates machine code.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch

import fusednorm
from fusednorm.devices.device_properties import GpuModel
from fusednorm.launch.inspection import specialise_kernel
from fusednorm.launch.launches import Launch
from fusednorm.launch.recorded_launches import bind_to_meta_tensors, recording_launches
from fusednorm.launch.stable_keys import store_stable_key
from fusednorm.policy.batch_invariance import require_batch_invariance
from fusednorm.results import Backward, Forward
from fusednorm.warm.absent_driver import build_launcher

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROWS = 8
_MOST_GROUPS = 32
_META = torch.device("meta")


def list_warm_launches(gpu: GpuModel, length: int, only_warm_up: bool) -> list[Launch]:
    """List the launches whose kernels a server on `gpu` needs for rows of `length` elements, in order of need.

    Each kernel is in the list once.

    First are the launches of its warm-up: every operation on x of each dtype, forward before backward, with float32
    parameters before those without parameters; a row is a sample of GroupNorm with up to 32 groups.  Then, unless
    `only_warm_up`, the launches of LayerNorm and RMSNorm with parameters of x's dtype, as registered layers have
    them: with and without statistics, forward and backward.
    """
    require_batch_invariance(True)
    with recording_launches(gpu) as noted:
        for with_parameters, direction, dtype in product((True, False), ("forward", "backward"), _DTYPES):
            _record_calls(length, direction, dtype, with_parameters)
        if not only_warm_up:
            for backward, dtype, op in product((False, True), _DTYPES, ("layer_norm", "rms_norm")):
                fusednorm.warmup(op, dtype, length, backward=backward, device=_META)
        return list(iterate_distinct_launches(noted))


def _record_calls(length: int, direction: str, dtype: torch.dtype, with_parameters: bool) -> None:
    """Make a forward or backward call of each operation on meta tensors, so that its launches are recorded."""
    x = torch.empty(_ROWS, length, dtype=dtype, device=_META)
    parameter = torch.empty(length, dtype=torch.float32, device=_META)
    tensors = (x,) if direction == "forward" else (x, x)
    for op in ("layer_norm", "rms_norm", "group_norm"):
        groups: tuple[int, ...] = ()
        named: dict[str, Any] = {}
        if with_parameters:
            named = {"weight": parameter} if op == "rms_norm" else {"weight": parameter, "bias": parameter}
        if op == "group_norm":
            groups = (math.gcd(length, _MOST_GROUPS),)
            # If torch allocated the results, it would load modules for meta tensors, which takes half a second.
            named["out"] = Forward(x) if direction == "forward" else Backward(x)
        getattr(fusednorm, f"{op}_{direction}")(*tensors, *groups, **named)


def iterate_distinct_launches(launches: Iterable[Launch]) -> Iterator[Launch]:
    """Yield only the first launch of each compiled kernel, in the order of `launches`."""
    seen: set[Hashable] = set()
    for launch in launches:
        kind = make_kernel_key(launch)
        if kind not in seen:
            seen.add(kind)
            yield launch


def make_kernel_key(launch: Launch) -> Hashable:
    """Make the key of the compiled kernel of a launch; launches with the same compiled kernel have equal keys."""
    specialised = specialise_kernel(launch)
    source = specialised.source
    return (
        launch.kernel.fn,
        tuple(source.signature.items()),
        tuple(sorted(source.constants.items())),
        tuple(sorted(source.attrs)),
        tuple(sorted(specialised.options.items())),
    )


def compile_kernel(launch: Launch) -> Any:
    """Compile the kernel of a launch for the current device of Triton's driver, and return the kernel.

    Nothing is launched.
    """
    options = {"enable_fp_fusion": True, **launch.options}
    store_stable_key(launch.kernel)
    return launch.kernel.warmup(*bind_to_meta_tensors(launch.arguments), grid=launch.grid, **options)


def compile_in_parallel(gpu: GpuModel, call: Callable[[], object]) -> None:
    """Compile the kernels that `call` would launch on this process's GPU, in parallel threads.

    `call` makes a call on meta tensors, which is planned for `gpu`.  A single kernel is not compiled here,
    but by the call that needs it.  Kernels are compiled for the first device.  Only one thread at a time may
    call this function.

    Raises:
        KernelInputError: the call raises it.
    """
    with recording_launches(gpu) as noted:
        call()
        kernels = list(iterate_distinct_launches(noted))
    if len(kernels) > 1:
        with ThreadPoolExecutor(len(kernels)) as threads:
            list(threads.map(lambda launch: build_launcher(compile_kernel(launch)), kernels))
