"""Which classes of other libraries are norms that the kernels compute, seen by what they compute."""

import copy
import pickle
from functools import partial

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.api.patching.norms import (
    BiasedRMSNorm,
    BiasLayerNorm,
    CohereLayerNorm,
    DebertaLayerNorm,
    DetachedRMSNorm,
    FP32LayerNorm,
    FunctionalRMSNorm,
    GatedRMSNorm,
    GemmaRMSNorm,
    GroupNormAct,
    LayerNorm1P,
    LayerNorm2d,
    LayerNormAct,
    LlamaRMSNorm,
    MovedWeightRMSNorm,
    NormalizeRMSNorm,
    OlmoLayerNorm,
    OneSampleRMSNorm,
    RmsNormAct,
    SequenceLayerNorm,
    SizedAxisRMSNorm,
    StridedRMSNorm,
    T5LayerNorm,
    UnscaledSquareNorm,
    UnweightedRMSNorm,
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


class ChannelRMSNorm(LlamaRMSNorm):
    """Over the channels of [N, C, *spatial], as vision transformers write it."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class LayerNormAct2d(LayerNorm2d):
    """timm's LayerNorm2d with an activation of its own."""

    def __init__(self, size):
        super().__init__(size)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


RESULTS = {
    "weight alone": (CohereLayerNorm(8), "layer_norm"),
    "a row for each head": (CohereLayerNorm((4, 8)), "layer_norm"),
    "x_hat rounded": (DebertaLayerNorm(8), "layer_norm"),
    "no parameters": (OlmoLayerNorm(8), "layer_norm"),
    "one plus weight": (LayerNorm1P(8), "layer_norm, weight_offset=1"),
    "in float32": (FP32LayerNorm(8), "layer_norm"),
    "in float32, no parameters": (FP32LayerNorm(8, elementwise_affine=False), "layer_norm"),
    "bias alone": (BiasLayerNorm(8), "layer_norm"),
    "integer eps": (LlamaRMSNorm(8, eps=1), "rms_norm"),
    "any width": (UnweightedRMSNorm(), "rms_norm"),
    "biased": (BiasedRMSNorm(8), "rms_norm"),
    "layer_norm, silu": (LayerNormAct(8), "layer_norm with silu"),
    "layer_norm, leaky_relu": (LayerNormAct(8, nn.LeakyReLU(0.3)), "layer_norm with leaky_relu"),
    "rms_norm, gelu": (RmsNormAct(8), "rms_norm with gelu"),
    "rms_norm, no activation": (RmsNormAct(8, nn.Identity()), "rms_norm"),
    "group_norm, relu": (GroupNormAct(4), "group_norm with relu"),
    "over channels": (LayerNorm2d(4), "layer_norm, layout=nchw"),
    "over channels, no parameters": (LayerNorm2d(4, elementwise_affine=False), "layer_norm, layout=nchw"),
    "over channels, rms_norm": (ChannelRMSNorm(4), "rms_norm, layout=nchw"),
    "over channels, silu": (LayerNormAct2d(4), "layer_norm with silu, layout=nchw"),
    "normalize": (NormalizeRMSNorm(8), "rms_norm"),
    "normalize, over channels": (NormalizeRMSNorm(4, 1, 1), "rms_norm, layout=nchw"),
    "normalize, biased": (NormalizeRMSNorm(8, bias=True), "rms_norm"),
    "normalize, over channels, biased": (NormalizeRMSNorm(4, 1, 1, bias=True), "rms_norm, layout=nchw"),
    "weight moved to x": (MovedWeightRMSNorm(8), "rms_norm"),
    "over channels of sequences": (SequenceLayerNorm(4), "layer_norm, layout=nchw"),
}
COMPILED = ("layer_norm, leaky_relu", "biased", "group_norm, relu", "over channels, silu")
"""One of each operation and layout, which `make test` compiles; `make test-slow` compiles the others."""


@pytest.fixture(params=RESULTS)
def recognised(request, device):
    norm, described = RESULTS[request.param]
    return varied(copy.deepcopy(norm)).to(device), described


def make_x(norm, device, **kind):
    """An x of three axes, or an image for what takes one alone."""
    takes_images = isinstance(norm, LayerNorm2d) or getattr(norm, "axis", -1) == 1
    return torch.randn(*((2, 4, 3, 8) if takes_images else (2, 4, 8)), device=device, **kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_known_by_their_results(recognised, dtype, device):
    norm, described = recognised
    norm, x = norm.to(dtype), make_x(norm, device, dtype=dtype)
    want, names = norm(x), list(norm.state_dict())
    assert fusednorm.patch(norm).patched == {"": f"{described}, as {type(norm).__name__} has it"}
    assert list(norm.state_dict()) == names
    with Dispatched() as seen:
        y = norm(x)
    assert len(seen.names) == 1
    assert y.dtype == want.dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2**-6
    torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)


def test_gradients_of_norms_known_by_their_results(recognised, device):
    norm, _ = recognised
    patched, x = copy.deepcopy(norm), make_x(norm, device, requires_grad=True)
    fusednorm.patch(patched)
    want, got = (torch.autograd.grad(each(x).square().sum(), [x, *each.parameters()]) for each in (norm, patched))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_copies_of_norms_known_by_their_results(recognised, copied, device):
    norm, _ = recognised
    x = make_x(norm, device)
    fusednorm.patch(norm)
    want, other = norm(x), copied(norm)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(x), want)
    fusednorm.unpatch(other)
    torch.testing.assert_close(other(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "recognised",
    [name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in RESULTS],
    indirect=True,
)
def test_compilers_see_norms_known_by_their_results_unpatched(recognised, device):
    norm, described = recognised
    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    fusednorm.patch(norm)
    torch._dynamo.reset()
    x = make_x(norm, device)
    torch.testing.assert_close(torch.compile(norm, backend=backend, fullgraph=True)(x), norm(x))
    seen = {name for name in graphs[0] if "fusednorm" in name}
    # Only of a GroupNorm the library's operator is worth more than what a compiler makes.
    assert seen == ({"fusednorm.group_norm"} if described.startswith("group_norm") else set())


class RankNorm(LlamaRMSNorm):
    """Takes images with the channels first, and all else with the channels last."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else super().forward(x)


def test_a_call_of_a_rank_with_other_results_is_the_modules_own(device):
    norm = varied(RankNorm(8)).to(device)
    rows, images = torch.randn(2, 3, 8, device=device), torch.randn(2, 8, 3, 8, device=device)
    want = norm(rows), norm(images)
    assert fusednorm.patch(norm).patched == {"": "rms_norm, as RankNorm has it"}
    torch.testing.assert_close((norm(rows), norm(images)), want)


def test_a_declared_width_is_kept(device):
    norm = OlmoLayerNorm(8).to(device)
    fusednorm.patch(norm)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.randn(2, 6, device=device))


@pytest.mark.parametrize("kind", [LayerNorm2d, ChannelRMSNorm])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_norm_over_channels_returns_the_memory_format_of_its_class(kind, layout, device):
    norm = varied(kind(8)).to(device)
    x = torch.randn(2, 8, 3, 5, device=device).contiguous(memory_format=layout).requires_grad_()
    want = norm(x)
    gradient = torch.autograd.grad(want.square().sum(), x)
    fusednorm.patch(norm)
    y = norm(x)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x), gradient, rtol=1e-3, atol=1e-3)
    assert y.stride() == want.stride()


def test_a_declared_number_of_channels_is_kept(device):
    norm = LayerNorm2d(8, elementwise_affine=False).to(device)
    fusednorm.patch(norm)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.randn(2, 6, 3, 8, device=device))


def test_rows_of_tiny_norms_are_divided_as_normalize_does(device):
    norm = varied(NormalizeRMSNorm(8)).to(device)
    x = F.normalize(torch.randn(4, 8, device=device)) * torch.tensor(
        [[0.0], [1e-20], [1e-15], [1e-9]], device=device
    )
    patched, results = copy.deepcopy(norm), []
    assert fusednorm.patch(patched).patched
    for each in (norm, patched):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        results.append((y, dx))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("change", ["activation", "slope", "hook"])
def test_a_changed_activation_is_computed(change, device):
    norm, x = varied(LayerNormAct(8, nn.LeakyReLU())).to(device), torch.randn(3, 8, device=device)
    want_of = copy.deepcopy(norm)
    fusednorm.patch(norm)
    seen = []
    for each in (norm, want_of):
        if change == "activation":
            each.act = nn.Tanh()
        elif change == "slope":
            each.act.negative_slope = 0.5
        else:
            each.act.register_forward_hook(lambda *_: seen.append("called"))
    torch.testing.assert_close(norm(x), want_of(x))
    assert len(seen) == (2 if change == "hook" else 0)


class RaisingNorm(LlamaRMSNorm):
    """Takes no samples of the probe's shapes."""

    def forward(self, x):
        batch, *_, cols = x[:, :, :, :, :, None].shape
        return x.reshape(batch, cols)


class MultiplyingNorm(LlamaRMSNorm):
    """An RMSNorm at its initial weight alone."""

    def forward(self, x):
        return super().forward(x) * self.weight


class UnknownEpsLayerNorm(nn.Module):
    """LayerNorm with an unusual eps that only its code has."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], None, None, 3e-3)


class MishNorm(LlamaRMSNorm):
    """With an activation that no kernel has."""

    def __init__(self, size):
        super().__init__(size)
        self.activation = nn.Mish()

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


class CountingCallsNorm(LlamaRMSNorm):
    """Counts its calls."""

    def __init__(self, size):
        super().__init__(size)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class ListingNorm(LlamaRMSNorm):
    """Lists the shapes that it has seen."""

    def __init__(self, size):
        super().__init__(size)
        self.shapes = []

    def forward(self, x):
        self.shapes.append(x.shape)
        return super().forward(x)


class CachingNorm(LlamaRMSNorm):
    """Keeps its last result."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class BufferedNorm(LlamaRMSNorm):
    """With a buffer that calls may change."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("count", torch.zeros(1))


class RunningNorm(LlamaRMSNorm):
    """With statistics of earlier batches."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("running_var", torch.ones(size))


class OffsetNorm(LlamaRMSNorm):
    """With a parameter that no formula has."""

    def __init__(self, size):
        super().__init__(size)
        self.offset = nn.Parameter(torch.zeros(size))


class PositionNorm(LlamaRMSNorm):
    """With a weight for each position of an image."""

    def __init__(self, size):
        super().__init__((size, 2, 2))


class HeadBiasNorm(LlamaRMSNorm):
    """With a weight for all heads, and a bias for each."""

    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(2, size))


class PairNorm(LlamaRMSNorm):
    """Needs two tensors."""

    def forward(self, queries, keys):
        return super().forward(queries), super().forward(keys)


class DoublingInstanceNorm(nn.InstanceNorm2d):
    """Inherits torch's forward, and computes something else in it."""

    def _apply_instance_norm(self, input):
        return 2 * super()._apply_instance_norm(input)


NEITHER = "{} computes neither rms_norm nor layer_norm"
NONE = {
    UnscaledSquareNorm: NEITHER,
    MultiplyingNorm: NEITHER,
    HalvingNorm: NEITHER,
    lambda size: UnknownEpsLayerNorm(): NEITHER,
    RaisingNorm: "its forward of a few random samples raised IndexError",
    RememberingNorm: "{} has seen, which is unknown",
    CountingCallsNorm: "{} changes its calls when it is called",
    ListingNorm: "{} changes its shapes when it is called",
    CachingNorm: "{} changes its last when it is called",
    BufferedNorm: "{} has the buffer count, which is unknown",
    RunningNorm: "{} normalises by running statistics",
    OffsetNorm: "{} has the parameter offset, which is unknown",
    MishNorm: "{} contains Mish, which is unknown",
    SizedAxisRMSNorm: "{} chooses its steps by the sizes of x, as for [101, 8, 8]",
    OneSampleRMSNorm: "{} chooses its steps by the sizes of x, as for [1, 8]",
    StridedRMSNorm: "{} computes something else for an x that is not contiguous",
    DetachedRMSNorm: "{} has other gradients than rms_norm",
    PositionNorm: "its weight is [8, 2, 2]: expected [cols] or [heads, cols]",
    HeadBiasNorm: "its weight [8] and its bias [2, 8] are of two shapes",
    PairNorm: "the forward of {} needs more than x: keys",
    GatedRMSNorm: "{} multiplies by gate, which no kernel does",
    lambda size: FP32LayerNorm((4, size)): "normalized_shape [4, 8] is of several axes",
    nn.BatchNorm2d: "no kernel for BatchNorm2d",
    partial(nn.InstanceNorm2d, track_running_stats=True): "{} keeps running statistics, which no kernel does",
    partial(nn.InstanceNorm2d, dtype=torch.float64, affine=True): "its weight is float64",
    lambda size: nn.LazyInstanceNorm2d(track_running_stats=False): "{} has no number of channels yet",
    DoublingInstanceNorm: "{} replaces torch's _apply_instance_norm",
}


def test_what_is_tried_leaves_no_trace():
    norm = ListingNorm(8)
    fusednorm.patch(norm)
    assert norm.shapes == []


@pytest.mark.parametrize("kind", NONE)
def test_what_only_looks_like_one_is_left_alone(kind):
    norm = kind(8)
    report = fusednorm.patch(norm)
    assert report.patched == {}
    assert report.skipped == {"": NONE[kind].format(type(norm).__name__)}


class ProjectingNorm(nn.Module):
    """Named like a norm, and a projection."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


def test_a_layer_that_is_named_like_a_norm_is_not_taken_for_one():
    report = fusednorm.patch(nn.Sequential(ProjectingNorm()))
    assert (report.patched, report.skipped) == ({}, {})


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


class InstanceFunctional(nn.Module):
    """Calls another."""

    def forward(self, x):
        return F.instance_norm(x)


@pytest.mark.parametrize(("kind", "name"), [(Functional, "layer_norm"), (InstanceFunctional, "instance_norm")])
def test_a_call_of_a_function_is_reported(kind, name):
    report = fusednorm.patch(nn.Sequential(kind(), nn.Linear(8, 8)))
    assert not report.patched
    assert report.skipped == {"0": f"its forward calls the function {name}: only modules are patched"}


def test_a_forward_that_calls_this_library_is_not_reported(device):
    class Block(nn.Module):
        def forward(self, x):
            return fusednorm.layer_norm(x)

    report = fusednorm.patch(nn.Sequential(Block(), nn.LayerNorm(8)).to(device))
    assert not report.skipped


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
    assert fusednorm.patch(norm).skipped == {"": "LayerNorm computes neither rms_norm nor layer_norm"}


def test_timms_fast_norm_is_left_alone():
    norm = timm_layer_norm()(8)
    norm._fast_norm = True
    assert fusednorm.patch(norm).skipped == {"": "timm's fast norm is switched on, which autocast treats otherwise"}


class DroppingRMSNorm(LlamaRMSNorm):
    """With a dropout of its own."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_depends_on_the_mode_is_left_alone(training):
    report = fusednorm.patch(nn.Sequential(DroppingRMSNorm(8)).train(training))
    assert not report.patched
    assert training or "something else in training" in report.skipped["0"]
