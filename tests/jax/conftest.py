"""Leaves out the tests of `fusednorm.jax` where JAX is not installed, as in the environment of all other tests.

Where it is, a CPU counts as two devices, and JAX takes memory of a GPU only as it needs it.
"""

import os
from importlib import util
from types import SimpleNamespace

import pytest

HAS_JAX = util.find_spec("jax") is not None

collect_ignore_glob = [] if HAS_JAX else ["test_*.py"]

# JAX reads them when it first looks for devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU where JAX has none."""
    if not HAS_JAX:
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="JAX has no GPU here"))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest):
    """Compute a test on the CPU, and on a GPU where there is one."""
    import jax

    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


class KernelStub:
    """Stands for what jaxlib has only with support of GPUs: kernels and their calls, which it records."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def TritonKernel(self, name: str, *values: object) -> str:  # noqa: N802
        return name

    def TritonKernelCall(self, kernel: str, x: int, y: int, z: int, parameters: list[object]) -> SimpleNamespace:  # noqa: N802
        call = SimpleNamespace(kernel=kernel, grid=(x, y, z), parameters=parameters)
        self.calls.append(call)
        call.to_proto = lambda name, metadata: name.encode()
        return call

    def create_array_parameter(self, zeroed_bytes: int, divisibility: int) -> str:
        return "array"

    def create_scalar_parameter(self, value: object, kind: str) -> tuple[str, object]:
        return kind, value


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> KernelStub:
    """Programs are lowered for a GPU of compute capability 9.0, whether there is one or not."""
    from fusednorm.jax import kernel_plans, triton_calls
    from fusednorm.jax.passes import ABSENT_GPU

    stub = KernelStub()
    monkeypatch.setattr(triton_calls, "gpu_triton", stub)
    monkeypatch.setattr(kernel_plans, "describe_gpu", lambda: ABSENT_GPU)
    return stub
