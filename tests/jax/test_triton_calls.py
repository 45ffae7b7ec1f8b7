"""Kernels lowered for a GPU that is not there: their arrays, their scalars, and the options that are refused."""

import re
from dataclasses import replace

import fusednorm.jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusednorm.arguments.arrays import Array, Workspace
from fusednorm.arguments.options import NormOptions
from fusednorm.devices.device_properties import H200
from fusednorm.errors import UnsupportedShapeError
from fusednorm.jax import triton_calls
from fusednorm.jax.kernel_plans import plan_launches
from fusednorm.jax.passes import ABSENT_GPU, ForwardPass

ROWS = {"x": (64, 1024), "weight": (1024,), "bias": (1024,)}
SAMPLES = {"x": (4, 16, 1024), "weight": (1024,), "scale": (4, 1024), "shift": (4, 1024)}
CHANNELS = {"x": (2, 96, 16, 16), "weight": (96,), "bias": (96,)}
IMAGES = {"x": (2, 64, 32, 32), "weight": (64,), "bias": (64,)}
IMAGES_LAST = {"x": (2, 32, 32, 64), "weight": (64,), "bias": (64,), "scale": (2, 64), "shift": (2, 64)}
FUSED = {"activation": "silu", "dropout": 0.1, "seed": (1 << 40) + 1}
CALLS = {
    "rows": ("layer_norm", {}, ROWS),
    "samples": ("layer_norm", FUSED, SAMPLES),
    "sum": ("add_rms_norm", {}, {"x": (64, 4096), "residual": (64, 4096), "weight": (4096,)}),
    "heads": ("layer_norm", {}, {"x": (4, 16, 128), "weight": (16, 128), "bias": (16, 128)}),
    "channels": ("layer_norm", {"layout": "nchw", "activation": "gelu"}, CHANNELS),
    "groups": ("group_norm", {"num_groups": 32, **FUSED}, IMAGES),
    "groups of channels last": ("group_norm", {"num_groups": 32, "layout": "nhwc"}, IMAGES_LAST),
    "sum of images": ("add_group_norm", {"num_groups": 8}, {**IMAGES, "residual": (2, 64, 32, 32)}),
}
SLOW_CALLS = {
    "a row in parts": ("layer_norm", {}, {"x": (4, 1 << 20), "weight": (1 << 20,)}),
    "a row in sweeps": ("add_layer_norm", {}, {"x": (4, 60000), "residual": (4, 60000), "weight": (60000,)}),
    "a group in parts": ("group_norm", {"num_groups": 32, **FUSED}, {"x": (1, 512, 256, 256), "weight": (512,)}),
    "odd channels": ("group_norm", {"num_groups": 3, "layout": "nhwc"}, {"x": (2, 50, 50, 9), "weight": (9,)}),
}


def lower(function, options, shapes):
    """Lower a call with its gradients for CUDA, and return the program."""

    def loss(inputs):
        result = getattr(fusednorm.jax, function)(**inputs, **options)
        return sum(each.astype(jnp.float32).sum() for each in jax.tree.leaves(result))

    inputs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return jax.jit(jax.value_and_grad(loss)).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()


def find_calls(program):
    """Find the number of operands of each kernel's call, and the number of each result's operand."""
    for call in re.findall(r"custom_call @triton_kernel_call_ffi\(.*", program):
        operands = call.partition("(")[2].partition(")")[0].count("%")
        aliases = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", call)
        yield operands, {int(result or 0): int(operand) for result, operand in aliases}


@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CALLS)])
def test_both_passes_are_lowered_for_a_gpu(name, kernels):
    program = lower(*(CALLS | SLOW_CALLS)[name])
    calls = list(find_calls(program))
    assert len(calls) == len(kernels.calls) >= 2
    for (operands, aliases), call in zip(calls, kernels.calls, strict=True):
        # jaxlib gives a kernel the buffers of operands, then those of results, in the order of its parameters.
        assert call.parameters.count("array") == operands
        assert sorted(aliases) == list(range(len(aliases)))
        assert len(set(aliases.values())) == len(aliases) >= 1


def test_xla_fuses_no_call_with_slices_of_a_scans_arrays(kernels):
    """A result written into a slice of a larger array would leave the operand that the kernel writes unread."""

    def compute(x, weights):
        return jax.lax.scan(lambda h, weight: (h + fusednorm.jax.rms_norm(h, weight), h), x, weights)

    program = jax.jit(compute).trace(jnp.zeros((8, 64)), jnp.zeros((3, 64))).lower(lowering_platforms=("cuda",))
    text = program.as_text()
    (call,) = re.findall(r"(%\S+) = stablehlo.custom_call @triton_kernel_call_ffi\((.*?)\)", text)
    result, operands = call
    barriers = dict(re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier (.*?) :", text))
    assert {operand.partition("#")[0] for operand in operands.split(", ")} <= barriers.keys()
    assert [name for name in barriers if result in barriers[name]]
    assert len(re.findall(rf"{result}\b", text)) == 2


def test_a_batch_of_no_calls_has_no_kernel(kernels):
    program = jax.jit(jax.vmap(fusednorm.jax.layer_norm)).trace(jnp.ones((0, 4, 8)))
    assert "triton_kernel_call" not in program.lower(lowering_platforms=("cuda",)).as_text()
    assert not kernels.calls


def test_a_size_that_is_a_symbol_is_refused_for_a_gpu_and_not_for_a_cpu(kernels):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 1024"), jnp.float32)
    call = jax.jit(fusednorm.jax.layer_norm)
    assert jax.export.export(call, platforms=("cpu",))(x).call(jnp.ones((3, 1024))).shape == (3, 1024)
    with pytest.raises(UnsupportedShapeError, match=r"^x \[rows, 1024\] needs sizes that are numbers on a GPU, "):
        call.trace(x).lower(lowering_platforms=("cuda",))


def test_scalars_have_the_types_that_kernels_declare(kernels):
    lower(*CALLS["samples"])
    scalars = [parameter for parameter in kernels.calls[0].parameters if parameter != "array"]
    # A stride, which is small here; a number of samples; eps.
    assert {("i64", 128), ("i32", 4), ("fp32", 1e-5)} <= set(scalars)
    # The seed is an array, so that the compiled program takes any.
    assert ("i64", FUSED["seed"]) not in scalars


def make_plan(device=ABSENT_GPU, shape=(64, 1024)):
    options = NormOptions("layer_norm").validate()
    shapes = {"x": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    return plan_launches(ForwardPass(options, False, ("x",), True), shapes, device)


@pytest.mark.parametrize("option", ["launch_cooperative_grid", "launch_pdl", "EARLY", "EARLY_REDUCE"])
def test_options_that_the_call_would_lose_are_refused(option, kernels):
    (launch,) = make_plan()
    triton_calls.check_options(replace(launch, options={**launch.options, option: False}))
    launch = replace(launch, options={**launch.options, option: True})
    with pytest.raises(RuntimeError, match=f"layer_norm_forward_tile_kernel is planned with {option}"):
        triton_calls.run_launches([launch], triton_calls.PlanBuffers({}, {}), 90)


def test_a_plan_for_torch_is_refused(kernels):
    with pytest.raises(RuntimeError, match="is planned with launch_cooperative_grid, which XLA cannot launch"):
        triton_calls.run_launches(make_plan(H200, (4, 1 << 20)), triton_calls.PlanBuffers({}, {}), 90)


def test_without_support_of_gpus_it_is_named(monkeypatch):
    monkeypatch.setattr(triton_calls, "gpu_triton", object())
    with pytest.raises(RuntimeError, match="without support of NVIDIA's GPUs"):
        triton_calls.run_launches([], triton_calls.PlanBuffers({}, {}), 90)


def test_parts_of_a_workspace_are_arrays_of_their_own():
    whole = Array(Workspace("float32", 12), "float32", (3, 4), (4, 1), ABSENT_GPU)
    buffers = triton_calls.PlanBuffers({}, {})
    first, second, _ = whole.unbind()
    assert buffers.get_or_allocate(first).shape == (4,)
    assert buffers.get_or_allocate(second) is buffers.get_or_allocate(second)
    with pytest.raises(RuntimeError, match="parts of a workspace overlap, from 0 and from 1 on"):
        buffers.get_or_allocate(replace(whole, offset=1))


def test_counters_are_zero_and_have_64_bits():
    counters = Array(Workspace("int64", 8, "counters"), "int64", (8,), (1,), ABSENT_GPU)
    with jax.enable_x64(True):
        value = triton_calls.PlanBuffers({}, {}).get_or_allocate(counters)
    assert value.dtype == np.int64
    assert not value.any()
