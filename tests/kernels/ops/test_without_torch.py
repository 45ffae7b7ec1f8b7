"""Calls are checked and planned where torch cannot be imported: as with it, launch for launch."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.kernels.harness.compiled import compile_elsewhere

# The shapes of the calls, and what is compared of their launches.
COMMON = """
import json
from fusednorm.arguments.arrays import Array
from fusednorm.devices.device_properties import H200

ROWS = (3, 5, 768), (4096, 4096), (64, 16384), (16, 131072), (1, 1 << 20)
SAMPLES = (2, 320, 64, 64), (2, 1280, 16, 16), (1, 512, 512, 512), (64, 64, 3)

def show(value):
    if isinstance(value, Array):
        memory = value.memory
        name = memory if isinstance(memory, str) else [memory.dtype, memory.count, memory.purpose, value.offset]
        return [name, value.dtype]
    return list(map(show, value)) if isinstance(value, tuple) else value

def describe(launch):
    return [launch.kernel.fn.__name__, launch.grid, show(launch.arguments), dict(launch.options)]
"""

PLANS = """
from fusednorm.arguments.arrays import contiguous_strides
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.options import NormOptions
from fusednorm.ops.group_norm import backward_choice as group_backward, forward_choice as group_forward
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormForwardCall
from fusednorm.ops.group_norm.checks import check_sample
from fusednorm.ops.group_norm.outputs import declare_backward_outputs as group_gradients
from fusednorm.ops.group_norm.outputs import declare_forward_outputs as group_results
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.checks import check_rows
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.ops.layer_norm.outputs import declare_backward_outputs, declare_forward_outputs
from fusednorm.results import Backward, Forward

def new(name, *shape, dtype="bfloat16"):
    return Array(name, dtype, shape, contiguous_strides(shape), H200)

def in_the_other_format(array):
    if len(array.shape) < 4:
        return array
    n, c, h, w = array.shape
    return Array(array.memory, array.dtype, array.shape, (c * h * w, 1, w * c, c), H200, is_dense=False)

def describe_results(outputs, x):
    described = {id(output): output.describe(x) for output in outputs if output is not None}
    return [described.get(id(output)) for output in outputs]

def rows(shape, activation):
    options = NormOptions("layer_norm", activation=activation).validate()
    x, weight, bias = new("x", *shape), new("weight", shape[-1]), new("bias", shape[-1])
    inputs = NormInputs(x, weight, bias)
    outputs = declare_forward_outputs(None, "bfloat16", True, False)
    out = Forward(*describe_results(outputs, x))
    yield from plan_forward(LayerNormForwardCall(**check_rows(options, inputs), options=options, out=out))
    mean, rstd = (new(name, *shape[:-1], dtype="float32") for name in ("mean", "rstd"))
    inputs = BackwardInputs(x, weight, bias, None, None, None, None, mean, rstd, new("dy", *shape), None)
    out = Backward(*describe_results(declare_backward_outputs(inputs.forward_inputs, True), x))
    yield from plan_backward(LayerNormBackwardCall(**check_rows(options, inputs), options=options, out=out))

def samples(shape, groups):
    options = NormOptions("group_norm", groups, activation="silu").validate()
    x, weight, bias = new("x", *shape), new("weight", shape[1]), new("bias", shape[1])
    inputs = NormInputs(x, weight, bias)
    sample = check_sample(options, inputs)
    given = {"x": x, "sample": sample, "affine": AffineParameters(weight, bias), "options": options}
    out = Forward(*describe_results(group_results(x, sample, None, "bfloat16", True), x))
    yield from group_forward.plan_forward(GroupNormForwardCall(**given, out=out))
    dy = in_the_other_format(new("dy", *shape))
    check_sample(options, BackwardInputs(x, weight, bias, None, None, None, None, None, None, dy, None))
    out = Backward(*describe_results(group_gradients(x, (weight, bias, None, None), False), x))
    yield from group_backward.plan_backward(GroupNormBackwardCall(dy=dy, **given, out=out))


calls = [*(rows(shape, "silu") for shape in ROWS), *(samples(shape, 32) for shape in SAMPLES)]
print(json.dumps([describe(launch) for call in calls for launch in call]))
"""

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
"""

IMPORTS = """
import importlib, pkgutil
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
        importlib.import_module(found.name)
"""

WITH_TENSORS = """
import fusednorm, torch
from fusednorm.launch.recorded_launches import recording_launches

def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

with recording_launches(H200) as launches:
    for shape in ROWS:
        x, w = new(*shape), new(shape[-1])
        fusednorm.layer_norm_forward(x, w, w, stats=True, activation="silu")
        saved = new(*shape[:-1], dtype=torch.float32)
        fusednorm.layer_norm_backward(x, x, w, w, mean=saved, rstd=saved, activation="silu")
    for shape in SAMPLES:
        x, w = new(*shape), new(shape[1])
        fusednorm.group_norm_forward(x, 32, w, w, stats=True, activation="silu")
        dy = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
        fusednorm.group_norm_backward(dy, x, 32, w, w, activation="silu")
print(json.dumps([describe(launch) for launch in launches]))
"""


def test_plans_without_torch_are_those_of_tensors():
    # Plans of a compiled kernel: the interpreter allows no program to wait.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_TORCH + COMMON + PLANS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)
    assert len({kernel for kernel, *_ in plans}) > 10
    assert plans == compile_elsewhere(COMMON + WITH_TENSORS)


def test_modules_that_may_not_know_torch_are_imported_without_it():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (contract,) = (
        contract
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["name"] == "checks and plans know no torch"
    )
    command = [sys.executable, "-c", WITHOUT_TORCH + IMPORTS, *contract["source_modules"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
