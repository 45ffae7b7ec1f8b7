"""Execution of planned launches inside a JAX trace; the only module that knows how XLA launches Triton's kernels.

A kernel is compiled by Triton, as for torch, and called by the custom call that jaxlib has for the kernels of
Pallas.  That call has no launch options: a kernel whose programs wait for one another, or that starts before the
previous kernel ends, must not be given to it.

All arrays of a kernel are operands of its call, in the order of its parameters.  XLA allocates those that it
writes, and the call gives them back: so the launches of a plan run in order, and nothing is copied.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import triton
from jax import lax
from jaxlib import gpu_triton
from triton.backends.compiler import GPUTarget

from fusednorm.arguments.arrays import Array, Workspace
from fusednorm.launch.inspection import specialise_kernel
from fusednorm.launch.launches import Launch
from fusednorm.launch.stable_keys import store_stable_key

_TARGET = "triton_kernel_call_ffi"

_LOST_OPTIONS = ("launch_cooperative_grid", "launch_pdl", "EARLY", "EARLY_REDUCE")
"""Options of launches that the custom call would lose, and the constexprs of kernels that rely on them."""

_WARP = 32


class PlanBuffers:
    """The values of a plan's arrays: the inputs, and what launches have written so far.

    Args:
        inputs: the arrays that launches only read, by the names of their memory.
        results: shape and dtype of each result, by the names of their memory.
    """

    def __init__(self, inputs: Mapping[str, jax.Array], results: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        self._inputs = inputs
        self._results = results
        self._written: dict[tuple[str | Workspace, int], jax.Array] = {}

    def is_input(self, array: Array) -> bool:
        """Return whether launches only read an array."""
        return isinstance(array.memory, str) and array.memory in self._inputs

    def get_or_allocate(self, array: Array) -> jax.Array:
        """Return the value of an array, which has no meaning if no launch has written it.

        Raises:
            RuntimeError: the array overlaps another one of a workspace.
        """
        memory = array.memory
        if isinstance(memory, str) and memory in self._inputs:
            return self._inputs[memory]
        key = memory, array.offset
        if key not in self._written:
            self._check_no_overlap(array)
            self._written[key] = self._allocate(array)
        return self._written[key]

    def _allocate(self, array: Array) -> jax.Array:
        memory = array.memory
        if isinstance(memory, str):
            result = self._results[memory]
            return lax.empty(result.shape, result.dtype)
        if memory.purpose is not None:
            # Zero at first; a launch leaves it so for the next.
            return lax.full((memory.count,), 0, np.dtype(memory.dtype))
        return lax.empty((array.numel(),), np.dtype(array.dtype))

    def _check_no_overlap(self, array: Array) -> None:
        for (memory, offset), value in self._written.items():
            if (
                memory is array.memory
                and offset < array.offset + array.numel()
                and array.offset < offset + value.size
            ):
                raise RuntimeError(f"parts of a workspace overlap, from {offset} and from {array.offset} on")

    def replace(self, array: Array, value: jax.Array) -> None:
        """Keep the value of an array after a launch that may have written it."""
        self._written[array.memory, array.offset] = value

    def list_results(self) -> list[jax.Array]:
        """Return the results, in their order."""
        return [self._written[name, 0] for name in self._results]


def run_launches(launches: Iterable[Launch], buffers: PlanBuffers, compute_capability: int) -> None:
    """Call the kernels of a plan in order.

    Args:
        launches: a plan in which no program waits for another, and no kernel starts early.
        compute_capability: the device's, as 90 for 9.0.

    Raises:
        RuntimeError: a launch has an option that would be lost, or JAX is installed without support of GPUs.
    """
    if not hasattr(gpu_triton, "TritonKernelCall"):
        raise RuntimeError("JAX is installed without support of NVIDIA's GPUs: pip install 'jax[cuda13]'")
    # Counters have 64 bits.
    with jax.enable_x64(True):
        for launch in launches:
            check_options(launch)
            _call_kernel(launch, buffers, compute_capability)


def check_options(launch: Launch) -> None:
    """Raise RuntimeError if a launch has an option that the custom call would lose."""
    lost = " and ".join(name for name in _LOST_OPTIONS if launch.options.get(name))
    if lost:
        raise RuntimeError(
            f"{launch.kernel.fn.__name__} is planned with {lost}, which XLA cannot launch: plan it for a device "
            "without launch options"
        )


def _call_kernel(launch: Launch, buffers: PlanBuffers, compute_capability: int) -> None:
    source = specialise_kernel(launch)
    parameters = list(_iterate_parameters(source.source.signature.values(), launch.arguments))
    arrays = [value for _, value in parameters if isinstance(value, Array)]
    written = {place: array for place, array in enumerate(arrays) if not buffers.is_input(array)}
    # Without barriers XLA fuses a call in a loop with slices of larger arrays, and then no longer knows that a
    # result is in the memory of an operand.
    operands = lax.optimization_barrier([buffers.get_or_allocate(array) for array in arrays])
    call = gpu_triton.TritonKernelCall(
        _compile_kernel(launch, source, compute_capability),
        *(*launch.grid, 1, 1)[:3],
        [
            gpu_triton.create_array_parameter(0, 16 if value.is_aligned else 0)
            if isinstance(value, Array)
            else gpu_triton.create_scalar_parameter(value, kind)
            for kind, value in parameters
        ],
    )
    run = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(operands[place].shape, operands[place].dtype) for place in written],
        input_output_aliases={place: number for number, place in enumerate(written)},
    )
    opaque = zlib.compress(call.to_proto(launch.kernel.fn.__name__, b""))
    values = lax.optimization_barrier(run(*operands, opaque=opaque))
    for array, value in zip(written.values(), values, strict=True):
        buffers.replace(array, value)


def _iterate_parameters(types: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield type and value of each parameter of a compiled kernel, which has neither tuples nor constants."""
    for kind, value in zip(types, values, strict=False):
        if isinstance(kind, tuple):
            yield from _iterate_parameters(kind, value)
        elif kind != "constexpr":
            yield kind, value


def _compile_kernel(launch: Launch, specialised: Any, compute_capability: int) -> Any:
    """Compile the kernel of a launch, or find it in Triton's cache."""
    store_stable_key(launch.kernel)
    target = GPUTarget("cuda", compute_capability, _WARP)
    compiled = triton.compile(specialised.source, target=target, options=specialised.options)
    metadata = compiled.metadata
    scratch = (metadata.global_scratch_size, metadata.global_scratch_align) if metadata.global_scratch_size else ()
    return gpu_triton.TritonKernel(
        metadata.name,
        metadata.num_warps,
        metadata.num_ctas,
        metadata.shared,
        compiled.asm["ptx"],
        compiled.asm["ttir"],
        compute_capability,
        *scratch,
    )
