"""Plans for JAX: no kernel of them waits for another program, or starts before the previous kernel ends."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from fusednorm.arguments.options import NormOptions
from fusednorm.devices.gpu_models import GPUS
from fusednorm.jax.kernel_plans import plan_launches
from fusednorm.jax.passes import BackwardPass, ForwardPass
from fusednorm.jax.triton_calls import check_options
from fusednorm.ops.group_norm import config_tables as group_tables
from fusednorm.ops.layer_norm import config_tables as row_tables
from fusednorm.ops.layer_norm.channels_first import config_tables as channel_tables

DTYPES = {2: jnp.bfloat16, 4: jnp.float32}


def list_row_lengths():
    """List row lengths at and beside every limit of every table of rows."""
    limits = set()
    for tables in (row_tables.FORWARD, row_tables.BACKWARD):
        limits |= {limit for table in tables.values() for limit, _ in table}
    for tables in (row_tables.FORWARD_UNALIGNED, row_tables.BACKWARD_UNALIGNED, row_tables.FORWARD_WITH_RESIDUAL):
        limits |= {limit for table in tables.values() for first, last, _ in table for limit in (first, last)}
    near = {size for limit in limits for size in (limit - 1, limit, limit + 8)}
    return sorted(size for size in near | {1 << 20, (1 << 20) + 3} if 0 < size <= 1 << 21)


def plan_both_passes(op, shapes, dtype, device, layout=None, num_groups=0, channels_last=False, activation="none"):
    """Plan a forward pass with statistics, and backward passes with and without them."""
    options = NormOptions(op, num_groups, activation=activation, layout=layout).validate()
    inputs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    forward = ForwardPass(options, channels_last, tuple(inputs), True)
    results = forward.list_results(inputs)
    yield from plan_launches(forward, inputs, device)
    saved = {name: results[name] for name in ("mean", "rstd") if name in results}
    sums = {"dresidual_out": results["residual_out"]} if "residual_out" in results else {}
    for statistics in (saved, {}):
        given = {**inputs, **statistics, "dy": inputs["x"], **sums}
        yield from plan_launches(BackwardPass(options, channels_last, tuple(given), True), given, device)


def check(device, *plans):
    for launch in itertools.chain(*plans):
        check_options(launch)
        assert "launch_cooperative_grid" not in launch.options
        assert "launch_pdl" not in launch.options


@pytest.fixture(params=[gpu for gpu in GPUS if gpu.capability >= (9, 0)], ids=lambda gpu: gpu.name)
def gpu(request):
    return request.param._replace(has_launch_options=False)


@pytest.mark.parametrize("itemsize", DTYPES)
def test_plans_of_rows_of_every_table_can_be_launched(itemsize, gpu):
    dtype = DTYPES[itemsize]
    for cols, rows in itertools.product(list_row_lengths(), (1, 64)):
        plain = {"x": (rows, cols), "weight": (cols,), "bias": (cols,)}
        check(gpu, plan_both_passes("layer_norm", plain, dtype, gpu))
        of_sums = {"x": (rows, cols), "residual": (rows, cols), "weight": (cols,)}
        check(gpu, plan_both_passes("rms_norm", of_sums, dtype, gpu, activation="silu"))
        modulated = {"x": (1, rows, cols), "scale": (1, cols), "shift": (1, cols)}
        check(gpu, plan_both_passes("layer_norm", modulated, dtype, gpu))


@pytest.mark.parametrize("itemsize", DTYPES)
def test_plans_over_channels_of_every_table_can_be_launched(itemsize, gpu):
    tables = (*channel_tables.FORWARD.values(), *channel_tables.BACKWARD.values())
    limits = {limit for table in tables for limit, _ in table}
    for channels, positions in itertools.product(
        sorted({size for limit in limits for size in (limit, limit + 1)}), ((4, 4), (32, 33))
    ):
        shapes = {"x": (2, channels, *positions), "weight": (channels,), "bias": (channels,)}
        check(gpu, plan_both_passes("layer_norm", shapes, DTYPES[itemsize], gpu, layout="nchw"))


def list_samples(itemsize):
    """List channels and positions of samples at and above the limits of every table of groups."""
    yield from ((320, 64 * 64), (1280, 16 * 16), (512, 512 * 512), (96, 3), (33, 1000), (320, 257), (32, 24**3))
    for channels, positions, _ in group_tables.BACKWARD_CONTIGUOUS[itemsize]:
        yield from ((32 * channels, positions), (32 * channels, positions + 1))
    for length, _ in group_tables.FORWARD_CONTIGUOUS[itemsize]:
        yield from ((32, length), (64, length))
    for channels, positions, _ in group_tables.FORWARD_CHANNELS_LAST[itemsize]:
        yield from ((32 * channels, positions), (32 * channels, positions + 1))


@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_plans_of_groups_of_every_table_can_be_launched(itemsize, channels_last, gpu):
    for channels, positions in list_samples(itemsize):
        groups = 32 if channels % 32 == 0 else 3
        for samples in (1, 8):
            image = (samples, positions, channels) if channels_last else (samples, channels, positions)
            shapes = {"x": image, "weight": (channels,), "bias": (channels,)}
            given = {"dtype": DTYPES[itemsize], "device": gpu, "num_groups": groups, "channels_last": channels_last}
            check(gpu, plan_both_passes("group_norm", shapes, **given))
            of_sums = {**shapes, "residual": image, "scale": (samples, channels), "shift": (samples, channels)}
            check(gpu, plan_both_passes("group_norm", of_sums, **given, activation="silu"))


def test_a_device_with_launch_options_has_plans_that_need_them():
    """The tables have such algorithms: plans for the same device as torch's are not these."""
    h200 = next(gpu for gpu in GPUS if gpu.name == "H200")
    shapes = {"x": (16, 1 << 17), "weight": (1 << 17,), "bias": (1 << 17,)}
    launches = list(plan_both_passes("layer_norm", shapes, jnp.bfloat16, h200))
    assert any(launch.options.get("launch_cooperative_grid") for launch in launches)
    assert any(launch.options.get("launch_pdl") for launch in launches)
