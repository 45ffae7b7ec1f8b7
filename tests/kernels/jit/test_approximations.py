"""Kernels are compiled without NVIDIA's device library, which takes longer to link than they take to optimise."""

from tests.kernels.harness.compiled import compile_elsewhere

COMPILE = """
import json
import torch
import triton
import fusednorm
from fusednorm.devices.device_properties import H200
from fusednorm.launch.inspection import SM_90, specialise_kernel
from fusednorm.launch.recorded_launches import recording_launches

x, weight = (torch.empty(shape, device="meta") for shape in ((8, 1024), (1024,)))
image, channels = torch.empty(2, 32, 8, 8, device="meta"), torch.empty(32, device="meta")
linked = {}
for activation in ("none", "silu", "gelu_tanh", "gelu"):
    with recording_launches(H200) as launches:
        fusednorm.layer_norm_forward(x, weight, weight, activation=activation)
        if activation == "silu":
            fusednorm.layer_norm_backward(x, x, weight, weight, activation=activation)
            fusednorm.group_norm_forward(image, 4, channels, channels, activation=activation)
        for launch in launches:
            specialised = specialise_kernel(launch)
            compiled = triton.compile(specialised.source, target=SM_90, options=specialised.options)
            linked[f"{launch.kernel.fn.__name__} {activation}"] = "__nv_" in compiled.asm["llir"]
print(json.dumps(linked))
"""


def test_only_the_error_function_needs_the_device_library():
    linked = compile_elsewhere(COMPILE)
    assert len(linked) > 4
    assert [name for name, is_linked in linked.items() if is_linked] == ["layer_norm_forward_tile_kernel gelu"]
