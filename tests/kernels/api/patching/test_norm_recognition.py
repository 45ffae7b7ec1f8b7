"""Which classes of other libraries are norms that the kernels compute, seen by what they compute."""

import warnings
from functools import partial

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.kernels.api.patching.norms import (
    FunctionalRMSNorm,
    GemmaRMSNorm,
    LlamaRMSNorm,
    T5LayerNorm,
    UnscaledSquareNorm,
    timm_group_norm,
    timm_layer_norm,
    varied,
)

RMS_NORMS = [LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm, FunctionalRMSNorm]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", RMS_NORMS)
def test_rms_norms_are_known_by_their_results(kind, dtype, device):
    norm = varied(kind(64)).to(device, dtype)
    offset = ", weight_offset=1" if kind is GemmaRMSNorm else ""
    x = torch.randn(4, 64, device=device, dtype=dtype)
    want = norm(x)
    assert fusednorm.patch(norm).patched == {"": f"rms_norm{offset}, as {kind.__name__} has it"}
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(norm(x), want, rtol=tolerance, atol=tolerance)


def test_an_offset_is_added_in_float32(device):
    """1 + 2^-10 is 1 in bfloat16: gradients of small weights would be taken at another point."""
    norm = GemmaRMSNorm(4).to(device, torch.bfloat16)
    fusednorm.patch(norm)
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)
    y = norm(torch.ones(1, 4, device=device))
    torch.testing.assert_close(y, torch.full_like(y, 1 + 2.0**-10), rtol=1e-6, atol=0)


class RaisingNorm(LlamaRMSNorm):
    """Takes no samples of the probe's shape."""

    def forward(self, x):
        batch, cols = x.shape
        return x.reshape(batch, cols)


class NormalisingNorm(LlamaRMSNorm):
    """Subtracts the mean."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)


class MultiplyingNorm(LlamaRMSNorm):
    """An RMSNorm at its initial weight alone."""

    def forward(self, x):
        return super().forward(x) * self.weight


class BiasedLayerNorm(LlamaRMSNorm):
    """LayerNorm with all its parameters, and not derived from torch's."""

    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)


class NamelessEpsLayerNorm(nn.Module):
    """LayerNorm with an eps that only its code has."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, None, 1e-5)


class ActivatedNorm(LlamaRMSNorm):
    """With a module inside."""

    def __init__(self, size):
        super().__init__(size)
        self.activation = nn.SiLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class HalvingNorm(LlamaRMSNorm):
    """Right in float32, and far off in bfloat16."""

    def forward(self, x):
        return super().forward(x) if x.dtype is torch.float32 else super().forward(x) / 2


class RememberingNorm(LlamaRMSNorm):
    """With something in it that calls may change."""

    def __init__(self, size):
        super().__init__(size)
        self.seen = torch.zeros(1)


class BiasedNorm(LlamaRMSNorm):
    """With a parameter that no formula has."""

    def __init__(self, size):
        super().__init__(size)
        self.offset = nn.Parameter(torch.zeros(size))


NEITHER = "{} computes neither rms_norm nor layer_norm"
LAYER_NORM = "{} computes layer_norm: patched are classes with the forward of nn.LayerNorm"
NOT_COMPARED = (
    "{} is not compared with kernels: expected weight [cols], eps or variance_epsilon, and at most a bias"
)
NONE = {
    UnscaledSquareNorm: NEITHER,
    NormalisingNorm: LAYER_NORM,
    BiasedLayerNorm: LAYER_NORM,
    MultiplyingNorm: NEITHER,
    HalvingNorm: NEITHER,
    RaisingNorm: "its forward of a few random samples raised ValueError",
    RememberingNorm: "{} has seen, which is unknown",
    BiasedNorm: NOT_COMPARED,
    NamelessEpsLayerNorm: NOT_COMPARED,
    ActivatedNorm: NOT_COMPARED,
    nn.BatchNorm2d: "no kernel for BatchNorm2d",
    partial(nn.InstanceNorm2d, track_running_stats=True): "no kernel for InstanceNorm2d",
    nn.InstanceNorm2d: "InstanceNorm2d is patched if written as a GroupNorm of one channel a group",
}


@pytest.mark.parametrize("kind", NONE)
def test_what_only_looks_like_one_is_left_alone(kind):
    norm = kind(8)
    report = fusednorm.patch(norm)
    assert report.patched == {}
    assert report.skipped == {"": NONE[kind].format(type(norm).__name__)}


class PreNorm(nn.Module):
    """Named like a norm, and has one."""

    def __init__(self):
        super().__init__()
        self.layer_norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.layer_norm(x))


def test_a_module_around_a_norm_is_not_taken_for_one():
    report = fusednorm.patch(nn.Sequential(PreNorm()))
    assert report.patched == {"0.layer_norm": "layer_norm"}
    assert not report.skipped


class Functional(nn.Module):
    """Calls a norm's function, and has no norm."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:])


def test_a_call_of_a_function_is_reported():
    report = fusednorm.patch(nn.Sequential(Functional(), nn.Linear(8, 8)))
    assert not report.patched
    assert report.skipped == {"0": "its forward calls the function layer_norm: only modules are patched"}


def test_timms_norms_are_known_by_name_and_results(device):
    for norm, x in (
        (timm_layer_norm()(8), torch.randn(3, 8)),
        (timm_group_norm()(4, num_groups=2), torch.randn(3, 4, 5)),
    ):
        norm, x = varied(norm).to(device), x.to(device)
        want = norm(x)
        assert set(fusednorm.patch(norm).patched) == {""}
        torch.testing.assert_close(norm(x), want, rtol=1e-4, atol=1e-4)


def test_a_version_of_timm_that_computes_something_else_is_left_alone():
    norm = timm_layer_norm(lambda self, x: 2 * nn.LayerNorm.forward(self, x))(8)
    assert fusednorm.patch(norm).skipped == {"": "LayerNorm computes something else than layer_norm"}


def test_timms_fast_norm_is_left_alone():
    norm = timm_layer_norm()(8)
    norm._fast_norm = True
    assert fusednorm.patch(norm).skipped == {"": "timm's fast norm is switched on, which autocast treats otherwise"}


def test_looking_draws_no_random_numbers_and_calls_no_hooks(device):
    norm = varied(LlamaRMSNorm(8)).to(device)
    weight = norm.weight.detach().clone()
    norm.register_forward_hook(lambda *_: pytest.fail("called"))
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert fusednorm.patch(norm).patched
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(norm.weight, weight)
    assert norm.weight.grad is None


class TalkativeNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        warnings.warn("such dtypes are slow", stacklevel=2)
        return super().forward(hidden_states)


def test_what_is_tried_warns_nobody(device):
    assert fusednorm.patch(TalkativeNorm(64).to(device)).patched
