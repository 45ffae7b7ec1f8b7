"""Which kernels are compiled ahead, and in which order."""

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

PLAN = """
import json, sys
from fusednorm.devices.gpu_models import GPUS
from fusednorm.warm.warm_calls import make_kernel_key, list_warm_launches

gpus = {gpu.name: gpu for gpu in GPUS}

def planned(name, length, only_warm_up):
    return list_warm_launches(gpus[name], length, only_warm_up)
"""


def test_what_the_first_requests_need_comes_first():
    script = """
def has_weight(launch):
    return dict(zip(launch.kernel.arg_names, launch.arguments))["weight_ptr"] is not None
plan = planned("H200", 64, True)
print(json.dumps([
    "backward" if "backward" in launch.kernel.__name__ else "forward" if has_weight(launch) else "bare forward"
    for launch in plan
    if "reduce" not in launch.kernel.__name__
]))
"""
    kinds = compile_elsewhere(PLAN + script)
    first_backward, first_bare = kinds.index("backward"), kinds.index("bare forward")
    assert set(kinds[:first_backward]) == {"forward"}
    assert "forward" not in kinds[first_backward:]
    assert first_backward < first_bare


def test_each_kernel_comes_once_and_layers_after_the_warm_up():
    script = """
least = [make_kernel_key(launch) for launch in planned("H200", 64, True)]
every = [make_kernel_key(launch) for launch in planned("H200", 64, False)]
print(json.dumps([len(least), len(set(least)), len(every), len(set(every)), every[:len(least)] == least]))
"""
    least, distinct, every, all_distinct, begins_alike = compile_elsewhere(PLAN + script)
    assert least == distinct < every == all_distinct
    assert begins_alike


@pytest.mark.parametrize(("name", "early"), [("A100", False), ("L40S", False), ("H200", True), ("B200", True)])
def test_gpus_get_what_they_can_run(name, early):
    script = f"""
print(json.dumps(sorted({{bool(launch.options["EARLY"]) for launch in planned({name!r}, 1024, True)
                          if "EARLY" in launch.options}})))
"""
    assert compile_elsewhere(PLAN + script) == [early]


def test_calls_on_meta_tensors_are_refused_but_for_an_absent_gpu():
    script = """
import fusednorm, torch
from fusednorm.errors import KernelInputError
planned("A100", 64, True)
try:
    fusednorm.layer_norm_forward(torch.empty(2, 8, device="meta"))
except KernelInputError as error:
    print(json.dumps(str(error)))
"""
    assert compile_elsewhere(PLAN + script) == "x must be on a CUDA device, got meta"


def test_calls_on_cpu_tensors_are_refused_with_the_place_that_computes_them():
    script = """
import fusednorm, json, torch
try:
    fusednorm.layer_norm_forward(torch.empty(2, 8))
except fusednorm.KernelInputError as error:
    print(json.dumps(str(error)))
"""
    remedy = "fusednorm.reference computes passes of CPU tensors"
    assert compile_elsewhere(script) == f"x must be on a CUDA device, got cpu: {remedy}"
