"""Modules that normalise in a real service: the kernel library's results and gradients, and they train."""

from itertools import product

import fusednorm
import pytest
import torch
from normserve.client import torch as remote
from normserve.codec.api_names import ACTIVATIONS
from torch import nn

from tests.integration.clients.torch_modules.pairs import KINDS, TOLERANCES, assert_same, pair, passes, random
from tests.sampling import mark_rest_slow


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_kernel_library(client, kind):
    reference, module, shape = pair(client, kind)
    x = random(*shape)
    assert_same(passes(module, x), passes(reference, x))
    assert [call.path.endswith("/backward") for call in client.calls] == [False, True]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_every_element_type(one, kind, dtype):
    reference, module, shape = pair(one, kind, dtype)
    x = random(*shape, dtype=dtype)
    assert_same(passes(module, x), passes(reference, x), dtype)


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_parameters_of_another_type_than_x(one, kind):
    reference, module, shape = pair(one, kind)
    x = random(*shape, dtype=torch.bfloat16)
    assert_same(passes(module, x), passes(reference, x), torch.bfloat16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_activations(one, kind, activation):
    reference, module, shape = pair(one, kind, activation=activation)
    x = random(*shape)
    assert_same(passes(module, x), passes(reference, x))
    assert repr(module) == repr(reference)


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_a_slope(one, kind):
    reference, module, shape = pair(one, kind, activation="leaky_relu", negative_slope=-0.75)
    x = random(*shape)
    assert_same(passes(module, x), passes(reference, x))
    assert repr(module) == repr(reference)
    assert one.calls[0].params["negative_slope"] == "-0.75"


@pytest.mark.parametrize("kind", ["layer norm", "layer norm of two axes", "RMS norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_kept_around_zero(one, kind, dtype):
    reference, module, shape = pair(one, kind, dtype, weight_offset=1.0)
    x = random(*shape, dtype=dtype)
    assert_same(passes(module, x), passes(reference, x), dtype)
    assert repr(module) == repr(reference)
    # The service adds 1 in float32: beside it, bfloat16 would lose them.
    assert one.calls[0].tensors["weight"].dtype.value == str(dtype).removeprefix("torch.")
    assert one.calls[0].params["weight_offset"] == "1.0"
    module.reset_parameters()
    assert not module.weight.any()


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("is_last", [False, True])
def test_group_norm_with_scale_and_shift(one, activation, is_last):
    reference, module, shape = pair(one, "group norm", activation=activation)
    x, scale, shift = random(*shape), random(2, 12, seed=1), random(2, 12, seed=2)
    if is_last:
        x = x.to(memory_format=torch.channels_last)
    assert_same(passes(module, x, scale, shift), passes(reference, x, scale, shift))
    for parameter in (*reference.parameters(), *module.parameters()):
        parameter.requires_grad_(False)
    of_scale = [
        torch.autograd.grad(each(x, leaf, shift), leaf, x)[0]
        for each, leaf in ((module, scale.clone().requires_grad_()), (reference, scale.clone().requires_grad_()))
    ]
    assert_same(of_scale[:1], of_scale[1:])
    assert ("shift" in one.calls[-1].tensors) == (activation != "none")


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("kind", ["layer norm", "layer norm of two axes", "RMS norm"])
def test_rows_with_scale_and_shift(one, kind, activation):
    _, module, shape = pair(one, kind, activation=activation)
    x, of = random(*shape), (shape[0], *module.normalized_shape)
    scale, shift = random(*of, seed=1).requires_grad_(), random(*of, seed=2).requires_grad_()
    y = module(x, scale, shift)
    named = {"weight": module.weight, "bias": getattr(module, "bias", None), "eps": module.eps or torch.finfo().eps}
    flat = {name: each.flatten() if torch.is_tensor(each) else each for name, each in named.items()}
    if kind == "RMS norm":
        del flat["bias"]
    function = fusednorm.rms_norm if kind == "RMS norm" else fusednorm.layer_norm
    axes = len(module.normalized_shape)
    modulations = {"scale": scale.flatten(-axes), "shift": shift.flatten(-axes)}
    right = function(x.flatten(-axes), **flat, **modulations, activation=activation).view(x.shape)
    leaves = (scale, shift, *module.parameters())
    assert_same((y, *torch.autograd.grad(y, leaves, x)), (right, *torch.autograd.grad(right, leaves, x)))
    with pytest.raises(ValueError, match="shift must end in normalized_shape"):
        module(x, scale, shift[..., :-1])


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_a_shift_that_is_frozen_is_not_sent_again(one, activation):
    _, module, shape = pair(one, "RMS norm", activation=activation)
    module.weight.requires_grad_(False)
    scale, shift = random(shape[0], shape[-1], seed=1).requires_grad_(), random(shape[0], shape[-1], seed=2)
    module(random(*shape), scale, shift).sum().backward()
    assert ("shift" in one.calls[-1].tensors) == (activation != "none")
    assert scale.grad.shape == scale.shape


@pytest.mark.parametrize("shape", [(2, 12, 5), (2, 12, 4, 5), (2, 12, 2, 3, 4), (2, 12, 1, 1), (1, 12, 4, 5)])
def test_channels_last_is_neither_copied_nor_lost(one, shape):
    reference, module, _ = pair(one, "group norm")
    x = random(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    results = passes(module, x)
    assert_same(results, passes(reference, x))
    for tensor in results[:2]:
        assert tensor.movedim(1, -1).is_contiguous()
    whole = x.is_contiguous()
    assert one.calls[0].params["layout"] == ("nchw" if whole else "nhwc")


@pytest.mark.parametrize(
    ("kind", "is_last", "shape"),
    mark_rest_slow(
        product(
            ["layer norm over channels", "RMS norm over channels"],
            [False, True],
            [(2, 12), (2, 12, 5), (2, 12, 4, 5), (2, 12, 1, 1), (0, 12, 4, 5)],
        )
    ),
)
def test_norms_over_channels(one, kind, shape, is_last):
    reference, module, _ = pair(one, kind)
    assert repr(module) == repr(reference)
    x = random(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    x = x if is_last else x.contiguous()
    results = passes(module, x)
    assert_same(results, passes(reference, x))
    sent_as_rows = not x.is_contiguous()
    assert one.calls[0].params.get("layout") == (None if sent_as_rows else "nchw")
    for tensor in results[:2]:
        assert (tensor.movedim(1, -1) if sent_as_rows else tensor).is_contiguous()
    scale, shift = random(*shape[:2], seed=1), random(*shape[:2], seed=2)
    assert_same((module(x, scale, shift),), (reference(x, scale, shift),))


@pytest.mark.parametrize("kind", ["layer norm over channels", "RMS norm over channels"])
def test_a_layout_needs_channels(one, kind):
    _, module, _ = pair(one, kind)
    for x in (random(12), random(2, 5, 12)):
        with pytest.raises(ValueError, match=r"x must be \[N, 12, \*spatial\], got"):
            module(x)
    made = type(module)
    with pytest.raises(ValueError, match="layout 'nchw' needs a normalized_shape of one axis"):
        made((3, 4), client=one, layout="nchw")
    with pytest.raises(ValueError, match="layout must be None or 'nchw', got 'nhwc'"):
        made(12, client=one, layout="nhwc")


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_strides_do_not_matter(one, kind):
    reference, module, shape = pair(one, kind)
    expanded = torch.ones(()).expand(shape)
    for x in (
        random(*shape[::-1]).permute(*range(len(shape))[::-1]),
        random(*shape[:-1], 2 * shape[-1])[..., ::2],
        random(1, *shape[1:]).expand(shape),
        torch.conj(torch.complex(random(*shape), random(*shape, seed=1))).imag,
    ):
        assert tuple(x.shape) == shape
        contiguous = x.clone(memory_format=torch.contiguous_format)
        assert_same(passes(module, x, dy=expanded), passes(reference, contiguous, dy=expanded))


@pytest.mark.parametrize("kind", ["layer norm", "layer norm of two axes", "RMS norm", "group norm"])
def test_no_rows(client, kind):
    _, module, shape = pair(client, kind)
    y, dx, *gradients = passes(module, random(0, *shape[1:]))
    assert y.shape == dx.shape == (0, *shape[1:])
    for gradient, parameter in zip(gradients, module.parameters(), strict=True):
        assert torch.equal(gradient, torch.zeros_like(parameter))


def trained(norms):
    """The losses of thirty steps of a model of two norms."""
    torch.manual_seed(0)
    first, second = norms
    model = nn.Sequential(nn.Linear(8, 32), first, nn.GELU(), nn.Linear(32, 32), second, nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    numbers, losses = torch.Generator().manual_seed(1), []
    for _ in range(30):
        x = torch.randn(64, 8, generator=numbers)
        loss = (model(x) - x[:, :2].prod(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_a_model_trains_as_with_the_kernels_in_its_own_process(client):
    expected = trained([fusednorm.LayerNorm(32), fusednorm.RMSNorm(32, activation="silu")])
    losses = trained([remote.LayerNorm(32, client=client), remote.RMSNorm(32, activation="silu", client=client)])
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    assert len(client.calls) == 30 * 2 * 2


def test_a_model_in_shared_memory_from_end_to_end(one):
    """x where the server sees it: neither it nor any result between the layers is copied on its way."""
    x = one.empty((4, 16), torch.float32)
    x.copy_(random(4, 16))
    model = nn.Sequential(*(remote.LayerNorm(16, client=one) for _ in range(3)))
    expected = nn.Sequential(*(nn.LayerNorm(16) for _ in range(3)))
    assert_same(passes(model, x), passes(expected, x.clone()))
