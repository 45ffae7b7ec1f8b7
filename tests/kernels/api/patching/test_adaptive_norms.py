"""A norm and the modulation behind it are one call in the adaptive norms of diffusers."""

import copy
import pickle

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.api.patching.norms import BiasedRMSNorm, FP32LayerNorm, LlamaRMSNorm, add_hook, varied

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
COLS, CONDITION = 8, 6


class Embedding(nn.Module):
    """Makes a condition of labels and timesteps."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, CONDITION)

    def forward(self, timestep, class_labels=None, hidden_dtype=None):
        row = self.table(timestep)
        row = row if class_labels is None else row + self.table(class_labels)
        return row if hidden_dtype is None else row.to(hidden_dtype)


class AdaLayerNorm(nn.Module):
    def __init__(self, emb=None, chunk_dim=0):
        super().__init__()
        self.chunk_dim, self.emb = chunk_dim, emb
        self.silu, self.linear = nn.SiLU(), nn.Linear(CONDITION, 2 * COLS)
        self.norm = nn.LayerNorm(COLS)

    def forward(self, x, timestep=None, temb=None):
        parts = self.linear(self.silu(temb if self.emb is None else self.emb(timestep)))
        if self.chunk_dim == 1:
            shift, scale = parts[:, None].chunk(2, dim=2)
        else:
            scale, shift = parts.chunk(2, dim=0)
        return self.norm(x) * (1 + scale) + shift


class AdaLayerNormZero(nn.Module):
    def __init__(self, emb=None, norm=None):
        super().__init__()
        self.emb, self.silu, self.linear = emb, nn.SiLU(), nn.Linear(CONDITION, 6 * COLS)
        self.norm = norm or nn.LayerNorm(COLS, elementwise_affine=False, eps=1e-6)

    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate, *others


class AdaLayerNormZeroSingle(nn.Module):
    def __init__(self):
        super().__init__()
        self.silu, self.linear = nn.SiLU(), nn.Linear(CONDITION, 3 * COLS)
        self.norm = nn.LayerNorm(COLS, elementwise_affine=False, eps=1e-6)

    def forward(self, x, emb=None):
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


class AdaLayerNormContinuous(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.silu, self.linear, self.norm = nn.SiLU(), nn.Linear(CONDITION, 2 * COLS), norm or nn.LayerNorm(COLS)

    def forward(self, x, conditioning_embedding):
        parts = self.linear(self.silu(conditioning_embedding).to(x.dtype))
        scale, shift = torch.chunk(parts, 2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class CogView4AdaLayerNormContinuous(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(CONDITION, 2 * COLS), nn.LayerNorm(COLS)

    def forward(self, x, conditioning_embedding):
        scale, shift = torch.chunk(self.linear(conditioning_embedding.to(x.dtype)), 2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class LuminaRMSNormZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.silu, self.linear, self.norm = nn.SiLU(), nn.Linear(CONDITION, 4 * COLS), LlamaRMSNorm(COLS)

    def forward(self, x, emb=None):
        scale, *others = self.linear(self.silu(emb)).chunk(4, dim=1)
        return self.norm(x) * (1 + scale[:, None]), *others


class Qwen2_5_OmniAdaLayerNormZero_Final(nn.Module):  # noqa: N801
    def __init__(self):
        super().__init__()
        self.silu, self.linear = nn.SiLU(), nn.Linear(CONDITION, 2 * COLS)
        self.norm = nn.LayerNorm(COLS, elementwise_affine=False)

    def forward(self, hidden_states, emb):
        scale, shift = torch.chunk(self.linear(self.silu(emb)), 2, dim=1)
        return self.norm(hidden_states) * (1 + scale)[:, None, :] + shift[:, None, :]


class AdaGroupNorm(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.num_groups, self.eps, self.act = 4, 1e-5, act
        self.linear = nn.Linear(CONDITION, 2 * COLS)

    def forward(self, x, emb):
        emb = self.linear(self.act(emb) if self.act else emb)[:, :, None, None]
        scale, shift = emb.chunk(2, dim=1)
        return F.group_norm(x, self.num_groups, eps=self.eps) * (1 + scale) + shift


LABELS = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([3, 4]), "hidden_dtype": torch.float32}
EMB = {"emb": torch.randn(2, CONDITION)}
EMBEDDING = {"conditioning_embedding": torch.randn(2, CONDITION)}
LAYER_NORM, WITH_BOTH = "layer_norm with scale and shift", "with scale and shift"
CASES = {
    "one condition": (AdaLayerNorm(), {"temb": torch.randn(CONDITION)}, LAYER_NORM),
    "one timestep": (AdaLayerNorm(nn.Embedding(10, CONDITION)), {"timestep": torch.tensor(3)}, LAYER_NORM),
    "one condition, chunk_dim=2": (AdaLayerNorm(chunk_dim=2), {"temb": torch.randn(CONDITION)}, LAYER_NORM),
    "shift first": (AdaLayerNorm(chunk_dim=1), {"temb": torch.randn(2, CONDITION)}, LAYER_NORM),
    "zero": (AdaLayerNormZero(), EMB, LAYER_NORM),
    "zero, of labels": (AdaLayerNormZero(Embedding()), LABELS, LAYER_NORM),
    "zero, in float32": (
        AdaLayerNormZero(norm=FP32LayerNorm(COLS, elementwise_affine=False)),
        EMB,
        LAYER_NORM,
    ),
    "single": (AdaLayerNormZeroSingle(), EMB, LAYER_NORM),
    "continuous": (AdaLayerNormContinuous(), EMBEDDING, LAYER_NORM),
    "continuous, rms_norm": (AdaLayerNormContinuous(LlamaRMSNorm(COLS)), EMBEDDING, f"rms_norm {WITH_BOTH}"),
    "continuous, torch's rms_norm": (
        AdaLayerNormContinuous(nn.RMSNorm(COLS)),
        EMBEDDING,
        f"rms_norm {WITH_BOTH}",
    ),
    "without activation": (CogView4AdaLayerNormContinuous(), EMBEDDING, LAYER_NORM),
    "without shift": (LuminaRMSNormZero(), EMB, "rms_norm with scale"),
    "final": (Qwen2_5_OmniAdaLayerNormZero_Final(), EMB, LAYER_NORM),
    "groups": (AdaGroupNorm(), EMB, f"group_norm {WITH_BOTH}"),
    "groups, silu": (AdaGroupNorm(nn.SiLU()), EMB, f"group_norm {WITH_BOTH}"),
}
COMPILED = ("zero, of labels", "continuous, rms_norm", "groups, silu")
"""One of each operation, which `make test` compiles; `make test-slow` compiles the others."""


@pytest.fixture(params=CASES)
def case(request, device):
    """A module, its x and its other arguments, and the description of its forward."""
    norm, others, described = CASES[request.param]
    norm = varied(copy.deepcopy(norm)).to(device)
    x = torch.randn(2, *((8, 4, 4) if isinstance(norm, AdaGroupNorm) else (3, COLS)), device=device)
    others = {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in others.items()}
    return norm, x, others, described


def operators(norm, x, others):
    with Dispatched() as seen, torch.no_grad():
        norm(x, **others)
    return [name.removeprefix("fusednorm::") for name in seen.names]


def test_norm_and_modulation_are_one_call(case):
    norm, x, others, described = case
    want, names = norm(x, **others), list(norm.state_dict())
    state = torch.get_rng_state()
    assert fusednorm.patch(norm).patched[""] == f"{described}, as {type(norm).__name__} has it"
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(norm(x, **others), want, **TOLERANCE)
    assert operators(norm, x, others) == [described.split()[0]]
    assert list(norm.state_dict()) == names
    fusednorm.unpatch(norm)
    got = norm(x, **others)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert not operators(norm, x, others)


def test_gradients(case):
    norm, x, others, _ = case
    patched = copy.deepcopy(norm)
    fusednorm.patch(patched)
    x.requires_grad_()
    results = []
    for each in (norm, patched):
        made = each(x, **others)
        total = sum(part.square().sum() for part in (made if isinstance(made, tuple) else (made,)))
        results.append(torch.autograd.grad(total, [x, *each.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_copies(case, copied):
    norm, x, others, described = case
    fusednorm.patch(norm)
    want, other = norm(x, **others), copied(norm)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(x, **others), want)
    assert operators(other, x, others) == [described.split()[0]]


@pytest.mark.parametrize(
    "case",
    [name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
    indirect=True,
)
def test_compilers_see_rows_as_if_nothing_were_patched(case):
    norm, x, others, described = case
    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if "fusednorm" in str(node.target)})
        return graph

    fusednorm.patch(norm)
    torch._dynamo.reset()
    got = torch.compile(norm, backend=backend, fullgraph=True)(x, **others)
    torch.testing.assert_close(got, norm(x, **others), **TOLERANCE)
    assert graphs == [{"fusednorm.group_norm"} if described.startswith("group_norm") else set()]


MIXED = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("dtype", "condition"), MIXED)
@pytest.mark.parametrize("kind", [AdaLayerNormZero, AdaGroupNorm])
def test_the_dtype_is_the_one_that_torch_returns(kind, dtype, condition, device):
    norm = varied(kind()).to(device, condition)
    x = torch.randn(2, *((8, 4, 4) if kind is AdaGroupNorm else (3, COLS)), device=device, dtype=dtype)
    emb = torch.randn(2, CONDITION, device=device, dtype=condition)
    want = norm(x, emb=emb)
    fusednorm.patch(norm)
    got = norm(x, emb=emb)
    assert operators(norm, x, {"emb": emb})
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-5)


def test_a_norm_with_a_hook_is_called(device):
    norm, x = varied(AdaLayerNormZero()).to(device), torch.randn(2, 3, COLS, device=device)
    emb = torch.randn(2, CONDITION, device=device)
    want = norm(x, emb=emb)
    fusednorm.patch(norm)
    seen = []
    norm.norm.register_forward_hook(lambda *_: seen.append("called"))
    torch.testing.assert_close(norm(x, emb=emb), want, **TOLERANCE)
    assert seen == ["called"]


@pytest.mark.parametrize(
    "shape", [(2, 2, 2, COLS), (1, 3, COLS), (2, 0, COLS), (2, COLS)], ids=["images", "one x", "no tokens", "rows"]
)
def test_other_shapes_are_computed_as_before(shape, device):
    norm, x = varied(AdaLayerNormContinuous()).to(device), torch.randn(*shape, device=device)
    condition = torch.randn(2, CONDITION, device=device)
    want = norm(x, condition)
    fusednorm.patch(norm)
    torch.testing.assert_close(norm(x, condition), want, **TOLERANCE)
    torch.testing.assert_close(norm(x=x, conditioning_embedding=condition), want, **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_several_conditions_of_one_projection_are_for_tokens(samples, rows, device):
    """diffusers halves the rows of the projection, and adds no axis for the tokens."""
    norm = AdaLayerNorm()
    norm.linear = nn.Linear(CONDITION, COLS)
    norm, x = varied(norm).to(device), torch.randn(samples, rows, COLS, device=device)
    for count in (rows, 1):
        temb = torch.randn(2 * count, CONDITION, device=device)
        want, patched = norm(x, temb=temb), copy.deepcopy(norm)
        assert fusednorm.patch(patched).patched[""]
        torch.testing.assert_close(patched(x, temb=temb), want, **TOLERANCE)


def test_float64_is_computed_by_torch(device):
    norm, x = varied(AdaLayerNormContinuous()).cpu(), torch.randn(2, 3, COLS)
    fusednorm.patch(norm)
    want_of = copy.deepcopy(norm)
    fusednorm.unpatch(want_of)
    arguments = x.double(), torch.randn(2, CONDITION).double()
    assert torch.equal(norm.double()(*arguments), want_of.double()(*arguments))


def later_version():
    class Later(AdaLayerNormZeroSingle):
        def forward(self, x, emb=None):
            y, gate = super().forward(x, emb)
            return y + 1, gate

    Later.__name__ = "AdaLayerNormZeroSingle"
    return Later()


def raising_version():
    class Later(AdaLayerNormZeroSingle):
        def forward(self, x, emb, mask):
            return super().forward(x, emb)

    Later.__name__ = "AdaLayerNormZeroSingle"
    return Later()


def with_hook(module):
    add_hook(module.norm)
    return module


NOT_PATCHED = "its norm is not patched, or behind a hook of accelerate"
LEFT_ALONE = {
    "later": (later_version, "a small one of its kind computes something else"),
    "raising": (raising_version, "a small one of its kind raised TypeError"),
    "wide norm": (lambda: AdaLayerNormContinuous(nn.LayerNorm(COLS).double()), NOT_PATCHED),
    "hook": (lambda: with_hook(AdaLayerNormContinuous()), NOT_PATCHED),
    "biased norm": (
        lambda: AdaLayerNormContinuous(BiasedRMSNorm(COLS)),
        "its rms_norm has a bias or an activation of its own",
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_with_a_reason(name):
    make, reason = LEFT_ALONE[name]
    report = fusednorm.patch(make())
    assert "" not in report.patched
    assert report.skipped[""] == reason


def test_a_norm_named_like_an_adaptive_one_is_patched_once(device):
    kind = type("AdaLayerNorm", (nn.LayerNorm,), {})
    report = fusednorm.patch(nn.Sequential(kind(8)).to(device))
    assert report.patched == {"0": "layer_norm"}
    assert not report.skipped
