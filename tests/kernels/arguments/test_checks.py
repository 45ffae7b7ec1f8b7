"""What the launchers refuse, and in which words."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import (
    KernelInputError,
    UnsupportedShapeError,
    group_norm_backward,
    group_norm_forward,
    layer_norm_backward,
    layer_norm_chain,
    layer_norm_forward,
    reference,
)
from fusednorm.api import autograd
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.reference import chain as reference_chain


@pytest.fixture
def x(device):
    return torch.randn(4, 8, device=device)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": -1e-5}, "eps must be at least 0 and finite, got -1e-05"),
        ({"eps": float("nan")}, "eps must be at least 0 and finite, got nan"),
        ({"eps": None}, r"got None: torch.nn.RMSNorm's default is torch.finfo\(torch.float32\).eps"),
        ({"eps": "1e-5"}, r"got the str '1e-5': write float\(eps\)"),
        ({"eps": torch.ones(8)}, "eps must be at least 0 and finite, got Tensor$"),
        ({"layout": "nhwc"}, "layout must be .*, got 'nhwc': rows along the last axis need no layout"),
        ({"activation": "mish"}, f"activation must be one of {', '.join(ACTIVATIONS)}, got 'mish'"),
        ({"dropout": 1.0, "seed": 1}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": 0.5}, "dropout needs a seed, got None"),
        ({"weight_offset": 1.0}, "weight_offset needs a weight, got None"),
        ({"weight_offset": 0.5, "weight": torch.ones(8)}, "weight_offset must be 0 or 1, got 0.5"),
        ({"dropout": 0.5, "seed": 2**63}, "seed must be an int of 64 bits, got 9223372036854775808"),
        ({"weight": torch.ones(7)}, r"x \[4, 8\] needs weight \[8\], got \[7\]"),
        ({"weight": torch.ones(8, dtype=torch.int32)}, "weight must be float32, float16 or bfloat16"),
        ({"residual": torch.ones(8)}, r"residual must have x's shape \[4, 8\], got \[8\]"),
        (
            {"out_dtype": torch.float64},
            "out_dtype must be float32, float16, bfloat16 or float8_e4m3fn, got torch.float64",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(x, arguments, message):
    arguments = {k: v.to(x.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(KernelInputError, match=message):
        layer_norm_forward(x, **arguments)


def test_lazily_negated_views_are_refused(x):
    negated = torch.conj(torch.ones(8, dtype=torch.complex64, device=x.device)).imag
    with pytest.raises(KernelInputError, match="weight is a lazily negated view"):
        layer_norm_forward(x, negated)


@pytest.mark.parametrize("name", ["mean", "rstd"])
def test_lazily_negated_statistics_are_refused(x, name):
    statistics = {each: torch.rand(4, device=x.device) for each in ("mean", "rstd")}
    statistics[name] = torch._neg_view(statistics[name])
    with pytest.raises(KernelInputError, match=f"{name} is a lazily negated view"):
        layer_norm_backward(x, x, **statistics)
    grouped = {each: tensor[:, None] for each, tensor in statistics.items()}
    with pytest.raises(KernelInputError, match=f"{name} is a lazily negated view"):
        group_norm_backward(x, x, num_groups=1, **grouped)


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels take no tensor without memory")
@pytest.mark.parametrize(
    "run", [layer_norm_forward, lambda x: layer_norm_backward(x, x), lambda x: layer_norm_chain(x, [None])]
)
def test_rows_of_more_columns_than_kernels_count_are_refused(run):
    x = torch.empty(1, 2**30 + 1, dtype=torch.float16, device="meta")
    with pytest.raises(UnsupportedShapeError, match="must have at most 1073741824 columns, got 1073741825"):
        run(x)


@pytest.mark.parametrize("shape", [(), (8, 0)])
def test_x_needs_a_last_axis_with_elements(shape, device):
    with pytest.raises(KernelInputError, match=r"x must be \[..., cols\] with cols >= 1, got"):
        layer_norm_forward(torch.empty(shape, device=device))


def test_strides_that_no_kernel_handles_are_refused(x):
    with pytest.raises(UnsupportedShapeError, match="contiguous along its last axis"):
        layer_norm_forward(x.t())
    with pytest.raises(UnsupportedShapeError, match="one constant stride apart"):
        layer_norm_forward(x.new_empty(2, 3, 5, 8)[:, :2, :4])
    with pytest.raises(UnsupportedShapeError, match="weight must be contiguous"):
        layer_norm_forward(x, x.new_empty(16)[::2])


def test_statistics_come_in_pairs_and_in_float32(x):
    mean = torch.zeros(4, device=x.device)
    with pytest.raises(KernelInputError, match="mean and rstd must be passed together"):
        layer_norm_backward(x, x, mean=mean)
    with pytest.raises(KernelInputError, match=r"rstd must be float32 \[4\]"):
        layer_norm_backward(x, x, mean=mean, rstd=mean.half())


TAKES_EPS = {
    "function": lambda x, eps: autograd.layer_norm(x, eps=eps),
    "differentiated function": lambda x, eps: autograd.rms_norm(x.clone().requires_grad_(), eps=eps),
    "forward": lambda x, eps: layer_norm_forward(x, eps=eps).y,
    "backward": lambda x, eps: layer_norm_backward(x, x, eps=eps).dx,
    "groups forward": lambda x, eps: group_norm_forward(x, 2, eps=eps).y,
    "groups backward": lambda x, eps: group_norm_backward(x, x, 2, eps=eps).dx,
    "chain": lambda x, eps: layer_norm_chain(x, [None], eps=eps),
    "reference forward": lambda x, eps: reference.layer_norm_forward(x, eps=eps).y,
    "reference backward": lambda x, eps: reference.group_norm_backward(x, x, 2, eps=eps).dx,
    "reference chain": lambda x, eps: reference_chain.layer_norm_chain(x, [None], eps=eps),
}


@pytest.mark.parametrize("call", TAKES_EPS)
def test_eps_is_a_finite_number_of_at_least_0(x, call):
    call = TAKES_EPS[call]
    for eps in (-1, -1e-5, float("nan"), float("inf"), True, "1e-5", None, [1e-5], torch.tensor(1e-5)):
        with pytest.raises(KernelInputError, match="eps must be at least 0 and finite, got"):
            call(x, eps)
    torch.testing.assert_close(call(x, 1), call(x, 1.0), rtol=0, atol=0)
    # 2^-100 is lost in the sum with a variance.
    torch.testing.assert_close(call(x, 0), call(x, 2.0**-100), rtol=0, atol=0)


def test_an_int_as_eps_is_the_same_number(x):
    torch.testing.assert_close(layer_norm_forward(x, eps=2).y, F.layer_norm(x, (8,), eps=2.0))


TAKES_GROUPS = {
    "function": autograd.group_norm,
    "forward": lambda x, groups: group_norm_forward(x, groups).y,
    "backward": lambda x, groups: group_norm_backward(x, x, groups).dx,
    "reference forward": lambda x, groups: reference.group_norm_forward(x, groups).y,
    "reference backward": lambda x, groups: reference.group_norm_backward(x, x, groups).dx,
}


@pytest.mark.parametrize("call", TAKES_GROUPS)
@pytest.mark.parametrize("groups", [True, 2.0, "2", None, 0, -2, 3, 16])
def test_the_number_of_groups_is_an_int_that_divides_the_channels(x, call, groups):
    with pytest.raises(KernelInputError, match="num_groups must be"):
        TAKES_GROUPS[call](x, groups)


@pytest.mark.parametrize("seed", [True, 1.5, "1", -(2**63) - 1])
def test_a_seed_is_an_int64(x, seed):
    for call in (autograd.layer_norm, layer_norm_forward, reference.layer_norm_forward):
        with pytest.raises(KernelInputError, match="seed must be an int of 64 bits, got"):
            call(x, dropout=0.5, seed=seed)


@pytest.mark.parametrize("dropout", [True, "0.5", None, float("nan"), -0.5])
def test_dropout_is_a_probability(x, dropout):
    for call in (autograd.layer_norm, layer_norm_forward, reference.layer_norm_forward):
        with pytest.raises(KernelInputError, match=r"dropout must be in \[0, 1\), got"):
            call(x, dropout=dropout, seed=1)


def test_places_of_results_are_named(x):
    with pytest.raises(
        KernelInputError, match=r"out must be a Forward or None, got Tensor: write Forward\(y=...\)"
    ):
        layer_norm_forward(x, out=torch.empty_like(x))
    with pytest.raises(
        KernelInputError, match=r"out must be a Backward or None, got Tensor: write Backward\(dx=...\)"
    ):
        group_norm_backward(x, x, 2, out=torch.empty_like(x))
