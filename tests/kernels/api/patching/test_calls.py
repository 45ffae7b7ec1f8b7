"""What a call of a patched norm returns: of any strides, in which dtype, under autocast, and with which errors."""

import copy
from functools import partial
from itertools import product

import fusednorm
import pytest
import torch
from fusednorm.api import module_norms
from fusednorm.api.patching import norm_forwards
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.api.patching.norms import (
    FunctionalRMSNorm,
    GemmaRMSNorm,
    LlamaRMSNorm,
    MaskedRMSNorm,
    T5LayerNorm,
    varied,
)
from tests.sampling import mark_rest_slow

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def x(device):
    return torch.randn(2, 4, 8, device=device)


AS_THEY_COME = {
    "transposed": (nn.LayerNorm(8), lambda: torch.randn(2, 8, 5).transpose(1, 2)),
    "several axes, permuted": (nn.LayerNorm((4, 8)), lambda: torch.randn(8, 4, 2).permute(2, 1, 0)),
    "sliced rows": (nn.RMSNorm(8), lambda: torch.randn(2, 5, 24)[..., 8:16]),
    "heads of a fused projection": (nn.RMSNorm(4), lambda: torch.randn(2, 5, 3, 2, 4)[:, :, 1]),
    "heads before tokens": (nn.RMSNorm(4), lambda: torch.randn(2, 5, 3, 2, 4)[:, :, 1].transpose(1, 2)),
    "no parameters": (nn.LayerNorm(8, elementwise_affine=False), lambda: torch.randn(3, 8)),
    "no bias": (nn.LayerNorm(8, bias=False), lambda: torch.randn(3, 8)),
    "one row": (nn.LayerNorm(8), lambda: torch.randn(8)),
    "no rows": (nn.LayerNorm(8), lambda: torch.randn(0, 8)),
    "channels-last": (
        nn.GroupNorm(2, 4),
        lambda: torch.randn(2, 4, 3, 5).contiguous(memory_format=torch.channels_last),
    ),
    "cropped": (nn.GroupNorm(2, 4), lambda: torch.randn(2, 4, 6, 6)[..., 1:5, 1:5]),
    "expanded": (nn.GroupNorm(2, 4), lambda: torch.randn(1, 4, 6).expand(3, 4, 6)),
    "no samples": (nn.GroupNorm(2, 4), lambda: torch.randn(0, 4, 6)),
    "no positions": (nn.GroupNorm(2, 4), lambda: torch.randn(2, 4, 0)),
    "float64": (nn.LayerNorm(8, elementwise_affine=False), lambda: torch.randn(3, 8).double()),
}


@pytest.mark.parametrize("case", AS_THEY_COME)
def test_what_torch_takes_is_taken(case, device):
    norm, make = AS_THEY_COME[case]
    norm, x = copy.deepcopy(varied(norm)).to(device), make().to(device)
    want = norm(x)
    assert fusednorm.patch(norm).patched
    y = norm(x)
    assert y.dtype == want.dtype
    torch.testing.assert_close(y, want, **TOLERANCE)


def test_a_model_that_became_float64_is_computed_by_torch(x):
    norm = varied(nn.LayerNorm(8))
    fusednorm.patch(norm)
    norm.double()
    with Dispatched() as seen:
        y = norm(x.cpu().double())
    assert not seen.names
    torch.testing.assert_close(y, nn.functional.layer_norm(x.cpu().double(), (8,), norm.weight, norm.bias))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_that_became_of_another_kind_are_left_to_torch(name, device, x):
    norm = varied(nn.LayerNorm(8)).to(device)
    want = norm(x)
    fusednorm.patch(norm)
    parameter = getattr(norm, name).detach()
    setattr(norm, name, nn.Parameter(TwoTensor(parameter, parameter.clone())))
    with Dispatched() as seen:
        y = norm(x)
    assert not seen.names
    torch.testing.assert_close(y.a, want)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), LlamaRMSNorm(8)])
def test_errors_are_those_of_the_module(norm):
    norm, x = copy.deepcopy(norm), torch.randn(3, 6)
    with pytest.raises(Exception) as want:  # noqa: PT011
        norm(x)
    fusednorm.patch(norm)
    with pytest.raises(want.type) as got:
        norm(x)
    assert str(got.value) == str(want.value)


def test_a_call_with_more_than_x_is_the_modules_own(device, x):
    norm = varied(MaskedRMSNorm(8)).to(device)
    want = norm(x), norm(x, x)
    assert fusednorm.patch(norm).patched == {"": "rms_norm, as MaskedRMSNorm has it"}
    torch.testing.assert_close((norm(x), norm(x, x)), want)
    torch.testing.assert_close(norm(x, mask=x), want[1])


LOW = (torch.float16, torch.bfloat16)
TORCH_KINDS = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm, "group_norm": partial(nn.GroupNorm, 2)}
KINDS = {
    **TORCH_KINDS,
    "llama": LlamaRMSNorm,
    "t5": T5LayerNorm,
    "gemma": GemmaRMSNorm,
    "functional": FunctionalRMSNorm,
}
DTYPES = [
    (kind, x, weight)
    for kind in KINDS
    for x, weight in product((torch.float32, *LOW), repeat=2)
    if weight in (x, torch.float32) or kind in ("llama", "t5", "gemma")
]
"""What torch's own functions refuse on a CPU is left out."""


@pytest.mark.parametrize(
    ("kind", "x_dtype", "weight_dtype", "autocast"),
    mark_rest_slow((*each, autocast) for each in DTYPES for autocast in (None, *LOW)),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_the_dtype_is_the_one_that_torch_returns(kind, x_dtype, weight_dtype, autocast, device):
    norm = varied(KINDS[kind](8)).to(device, weight_dtype)
    x = torch.randn(3, 8, device=device, dtype=x_dtype)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        try:
            want = norm(x)
        except RuntimeError:
            pytest.skip("torch refuses these dtypes")
        fusednorm.patch(norm)
        got = norm(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


@pytest.fixture
def under_cudas_autocast(monkeypatch):
    """As it looks to a patched forward, also where there is no CUDA."""
    for module in (norm_forwards, module_norms):
        monkeypatch.setattr(module, "casts_to_float32", lambda x: True)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_wider_result_is_not_rounded_to_the_dtype_of_x(kind, device):
    norm = varied(KINDS[kind](64)).to(device)
    x = torch.randn(3, 64, device=device, dtype=torch.bfloat16)
    fusednorm.patch(norm)
    want = nn.functional.rms_norm(x.double(), (64,), norm.weight.double(), 1e-6)
    torch.testing.assert_close(norm(x).double(), want, rtol=1e-5, atol=1e-6)


AUTOCAST_RMS_NORM = pytest.mark.skipif(
    not module_norms.AUTOCASTS_RMS_NORM, reason="autocast of this torch leaves rms_norm as it is"
)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=AUTOCAST_RMS_NORM if kind == "rms_norm" else ()) for kind in TORCH_KINDS]
)
def test_cudas_autocast_computes_and_returns_float32(kind, device, under_cudas_autocast):
    norm = varied(TORCH_KINDS[kind](8)).to(device)
    fusednorm.patch(norm)
    x = torch.randn(3, 8, device=device, dtype=torch.bfloat16)
    y = norm(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, type(norm).forward(norm, x.float()))


@pytest.mark.parametrize(
    ("kind", "weight", "dtype"),
    [
        ("llama", torch.bfloat16, torch.bfloat16),
        ("llama", torch.float32, torch.float32),
        ("t5", torch.bfloat16, torch.bfloat16),
        ("gemma", torch.float32, torch.bfloat16),
        pytest.param("functional", torch.bfloat16, torch.float32, marks=AUTOCAST_RMS_NORM),
    ],
)
def test_cudas_autocast_reaches_functions_and_not_formulas(kind, weight, dtype, device, under_cudas_autocast):
    norm = KINDS[kind](8).to(device, weight)
    fusednorm.patch(norm)
    assert norm(torch.randn(3, 8, device=device, dtype=torch.bfloat16)).dtype == dtype
