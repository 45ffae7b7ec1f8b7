"""Kernels of one call, compiled side by side."""

from tests.kernels.harness.compiled import compile_elsewhere

BEGIN = """
import functools, json, threading
import fusednorm, torch
from fusednorm.devices.device_properties import H200
from fusednorm.launch.recorded_launches import recording_launches
from fusednorm.warm.warm_calls import compile_in_parallel
from fusednorm.warm.warm_calls import compile_kernel
from fusednorm.warm.absent_driver import AbsentDriver
from triton import knobs
from triton.runtime import driver

driver.set_active(AbsentDriver([H200]))
compiled = []
knobs.compilation.listener = lambda *, src, **_: compiled.append((src.name, threading.get_ident()))
x, w = torch.empty(4, 32, device="meta"), torch.empty(32, device="meta")
"""


def test_a_call_of_several_kernels_has_them_compiled_in_as_many_threads():
    script = """
call = functools.partial(fusednorm.layer_norm_backward, x, x, w)
compile_in_parallel(H200, call)
names, threads = zip(*compiled)
with recording_launches(H200) as noted:
    call()
for launch in noted:
    compile_kernel(launch)
print(json.dumps([sorted(names), len(set(threads)), threading.get_ident() in threads, len(compiled)]))
"""
    names, threads, is_here, after = compile_elsewhere(BEGIN + script)
    assert names == ["layer_norm_backward_reduce_kernel", "layer_norm_backward_tile_kernel"]
    assert threads == 2
    assert not is_here
    assert after == 2, "the call itself found its kernels at hand"


def test_a_single_kernel_is_left_to_its_call():
    script = """
compile_in_parallel(H200, lambda: fusednorm.layer_norm_forward(x, w))
print(json.dumps(compiled))
"""
    assert compile_elsewhere(BEGIN + script) == []


def test_a_call_that_is_refused_is_refused_here():
    script = """
from fusednorm.errors import KernelInputError
try:
    compile_in_parallel(H200, lambda: fusednorm.layer_norm_forward(x, w[1:]))
except KernelInputError as error:
    print(json.dumps(str(error)))
"""
    assert " needs weight [32], got [31]" in compile_elsewhere(BEGIN + script)
