"""Arguments of other types than the functions take are refused with what to write, and None is no activation."""

from functools import partial

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError, reference

X, WEIGHT = torch.randn(3, 64), torch.ones(64)
OTHER_X, OTHER_WEIGHT = X.numpy(), WEIGHT.numpy()

TO_TORCH = r"must be a torch tensor( or None)?, got ndarray: torch\.from_dlpack\({}\) makes one$"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: fusednorm.layer_norm(OTHER_X)),
        ("x", lambda: fusednorm.rms_norm(OTHER_X, WEIGHT)),
        ("x", lambda: fusednorm.group_norm(OTHER_X, 8)),
        ("x", lambda: fusednorm.instance_norm(OTHER_X)),
        ("x", lambda: fusednorm.add_layer_norm(OTHER_X, X)),
        ("x", lambda: fusednorm.LayerNorm(64)(OTHER_X)),
        ("x", lambda: fusednorm.LayerNorm(64, elementwise_affine=False)(OTHER_X)),
        ("x", lambda: fusednorm.RMSNorm(64)(OTHER_X)),
        ("x", lambda: fusednorm.GroupNorm(8, 64)(OTHER_X)),
        ("x", lambda: reference.layer_norm_forward(OTHER_X)),
        ("weight", lambda: fusednorm.layer_norm(X, OTHER_WEIGHT)),
        ("weight", lambda: fusednorm.layer_norm(X.clone().requires_grad_(), OTHER_WEIGHT)),
        ("bias", lambda: fusednorm.layer_norm(X, WEIGHT, OTHER_WEIGHT)),
        ("bias", lambda: fusednorm.group_norm(X, 8, WEIGHT, OTHER_WEIGHT)),
        ("residual", lambda: fusednorm.add_rms_norm(X, OTHER_X)),
        ("scale", lambda: fusednorm.layer_norm(X, scale=OTHER_X)),
        ("weight", lambda: reference.layer_norm_forward(X, OTHER_WEIGHT)),
        ("dy", lambda: reference.layer_norm_backward(OTHER_X, X)),
    ],
)
def test_arrays_of_other_libraries_are_refused_with_what_makes_them_tensors(name, call):
    with pytest.raises(KernelInputError, match=f"^{name} {TO_TORCH.format(name)}"):
        call()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: fusednorm.layer_norm_forward(OTHER_X)),
        ("weight", lambda: fusednorm.rms_norm_forward(X, OTHER_WEIGHT)),
        ("bias", lambda: fusednorm.group_norm_forward(X, 8, WEIGHT, OTHER_WEIGHT)),
        ("dy", lambda: fusednorm.layer_norm_backward(OTHER_X, X)),
        ("rstd", lambda: fusednorm.rms_norm_backward(X, X, rstd=OTHER_X[:, 0])),
        ("dy", lambda: fusednorm.group_norm_backward(OTHER_X, X, 8)),
        ("x", lambda: fusednorm.layer_norm_chain(OTHER_X, [WEIGHT])),
    ],
)
def test_launchers_refuse_them_too(name, call):
    with pytest.raises(KernelInputError, match=f"^{name} {TO_TORCH.format(name)}"):
        call()


@pytest.mark.parametrize(
    "x", [X, X.clone().requires_grad_(), X.to("meta")], ids=["plain", "differentiated", "meta"]
)
@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("layer_norm", fusednorm.add_layer_norm),
        ("rms_norm", fusednorm.add_rms_norm),
        ("group_norm", partial(fusednorm.add_group_norm, num_groups=8)),
    ],
)
def test_a_sum_needs_a_residual(op, call, x):
    with pytest.raises(KernelInputError, match=f"^add_{op} needs a residual, got None: without one call {op}$"):
        call(x, None)


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), ([1.0], "list"), (3.0, "float")])
def test_other_values_are_named(value, kind):
    with pytest.raises(KernelInputError, match=f"^x must be a torch tensor, got {kind}$"):
        fusednorm.layer_norm(value)
    with pytest.raises(KernelInputError, match=f"^dy must be a torch tensor, got {kind}$"):
        reference.group_norm_backward(value, X, 8)


@pytest.mark.parametrize("shape", [(64,), [64], 64, X.shape[-1:]])
@pytest.mark.parametrize(
    "call",
    [
        lambda shape: fusednorm.layer_norm(X, shape, WEIGHT, WEIGHT),
        lambda shape: fusednorm.layer_norm(X, shape),
        lambda shape: fusednorm.rms_norm(X, shape, WEIGHT),
        lambda shape: fusednorm.layer_norm_forward(X, shape, WEIGHT),
        lambda shape: reference.layer_norm_forward(X, shape),
        lambda shape: torch.vmap(lambda row: fusednorm.layer_norm(row, shape))(X),
    ],
)
def test_the_form_of_torch_is_refused_in_a_line_that_says_what_weight_is(shape, call):
    text = r"^weight must be a torch tensor or None, got .*64.*: there is no normalized_shape before weight$"
    with pytest.raises(KernelInputError, match=text) as refused:
        call(shape)
    assert "\n" not in str(refused.value)


def test_the_form_of_torchs_group_norm_is_taken():
    expected = torch.nn.functional.group_norm(X, 8, WEIGHT, WEIGHT)
    torch.testing.assert_close(fusednorm.group_norm(X, 8, WEIGHT, WEIGHT), expected)


@pytest.mark.parametrize("kind", [fusednorm.LayerNorm, fusednorm.RMSNorm])
@pytest.mark.parametrize("is_differentiated", [True, False])
def test_a_module_blames_x_for_its_axes(kind, is_differentiated):
    x = torch.randn(3, 65, requires_grad=is_differentiated)
    with pytest.raises(KernelInputError, match=r"^x must end in normalized_shape \[64\].*, got \[3, 65\]$"):
        kind(64)(x)
    with pytest.raises(KernelInputError, match="scale"):
        kind(64)(X, scale=x)


@pytest.mark.parametrize(
    "call",
    [
        lambda activation: fusednorm.layer_norm(X, activation=activation),
        lambda activation: fusednorm.rms_norm(X.clone().requires_grad_(), activation=activation),
        lambda activation: fusednorm.group_norm(X, 8, activation=activation),
        lambda activation: fusednorm.instance_norm(X[None], activation=activation),
        lambda activation: fusednorm.add_layer_norm(X, X, activation=activation).y,
        lambda activation: fusednorm.layer_norm_forward(X, activation=activation).y,
        lambda activation: fusednorm.group_norm_forward(X, 8, activation=activation).y,
        lambda activation: fusednorm.rms_norm_backward(X, X, activation=activation).dx,
        lambda activation: reference.layer_norm_forward(X, activation=activation).y,
        lambda activation: fusednorm.LayerNorm(64, activation=activation)(X),
        lambda activation: torch.vmap(lambda row: fusednorm.layer_norm(row, activation=activation))(X),
    ],
)
def test_none_is_no_activation(call):
    assert torch.equal(call(None), call("none"))


def test_a_module_without_an_activation_is_as_one_that_names_none():
    assert repr(fusednorm.RMSNorm(64, activation=None)) == repr(fusednorm.RMSNorm(64))
    assert fusednorm.GroupNorm(8, 64, activation=None).activation == "none"
