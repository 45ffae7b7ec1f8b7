"""Keys of compiled kernels: those of one process are found by another, in whatever order they come."""

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

KEYS = """
import json, sys
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction
from fusednorm.devices.device_properties import H200
from fusednorm.launch.stable_keys import store_stable_key
from fusednorm.warm.warm_calls import list_warm_launches

kernels = {launch.kernel.__name__: launch.kernel for launch in list_warm_launches(H200, 1024, False)}
for name in sorted(kernels, reverse=json.loads(sys.argv[1])):
    store_stable_key(kernels[name])
shared = []
for name, kernel in kernels.items():
    used = [each for (each, _), (value, _) in kernel.used_global_vals.items() if isinstance(value, constexpr)]
    shared += {each for each in used if used.count(each) > 1}
print(json.dumps([{name: kernel.cache_key for name, kernel in kernels.items()}, shared]))
"""


@pytest.fixture(scope="module")
def forwards():
    return compile_elsewhere(KEYS, "false")


def test_the_order_does_not_matter(forwards):
    keys, _ = forwards
    assert len(keys) > 4
    assert compile_elsewhere(KEYS, "true")[0] == keys


def test_no_two_constants_of_a_kernel_share_a_name(forwards):
    """Triton would order them by where they lie in a process."""
    _, shared = forwards
    assert not shared
