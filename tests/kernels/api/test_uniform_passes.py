"""Tensors of any strides, and empty rows and groups: functions and modules accept what torch's accept."""

import copy
import itertools

import fusednorm
import pytest
import torch
from fusednorm.api.uniform_passes import copy_unsupported_strides
from torch import nn
from torch._prims_common import check_significant_strides
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.api.norm_calls import CALLS, inputs

KINDS = {nn.LayerNorm: fusednorm.LayerNorm, nn.RMSNorm: fusednorm.RMSNorm, nn.GroupNorm: fusednorm.GroupNorm}


def layouts(shape):
    """Tensors of a shape: in all orders of axes, and in two also cropped, strided and expanded along each axis."""
    axes = len(shape)
    orders = list(itertools.permutations(range(axes)))
    for order in orders:
        yield torch.randn([shape[axis] for axis in order]).permute(*map(order.index, range(axes)))
    for order in {orders[0], (0, *range(2, axes), 1)[:axes] if axes > 1 else (0,)}:
        back = [order.index(axis) for axis in range(axes)]
        for axis in range(axes):
            longer = [2 * shape[each] if each == axis else shape[each] for each in order]
            wide = torch.randn(longer).permute(*back)
            yield wide.narrow(axis, 1, shape[axis])
            yield wide[tuple(slice(None, None, 2 if each == axis else 1) for each in range(axes))]
            yield wide.narrow(axis, 0, 1).expand(shape)


LAYOUTS = [
    ("layer_norm", (3, 8)),
    ("layer_norm", (2, 3, 8)),
    ("rms_norm", (2, 3, 2, 4)),
    ("group_norm", (2, 4)),
    ("group_norm", (2, 4, 3)),
    ("group_norm", (2, 4, 3, 5)),
    ("group_norm", (2, 4, 1, 5)),
]


@pytest.mark.parametrize(("op", "shape"), LAYOUTS)
def test_fake_results_have_the_strides_of_real_ones(op, shape, device):
    forward, backward = (getattr(torch.ops.fusednorm, name) for name in (op, f"{op}_backward"))
    settings = (2 if op == "group_norm" else 0, 1e-5, 0.0, "none", 0.0, 0)
    fakes = FakeTensorMode()

    def results(x, residual):
        y, mean, rstd, residual_out = forward(x, None, None, residual, None, None, *settings)
        statistics = None if op == "rms_norm" else mean, rstd
        gradients = backward(x, x, None, None, *statistics, residual, None, None, residual, *settings)
        return y, mean, rstd, residual_out, *gradients

    for x in layouts(shape):
        given = x.to(device), x.half().to(device)
        with fakes:
            fake = results(*(fakes.from_tensor(tensor) for tensor in given))
        for one, other in zip(results(*given), fake, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert check_significant_strides(one, other)[0], (x.stride(), one.stride(), other.stride())


@pytest.mark.parametrize("op", ["layer_norm", "group_norm"])
def test_compiled_results_have_the_strides_of_eager_ones(op, device):
    norm = fusednorm.GroupNorm(2, 4) if op == "group_norm" else fusednorm.LayerNorm(5)
    norm.to(device)
    for x in (
        torch.randn(2, 6, 3, 5).narrow(1, 1, 4),
        torch.randn(2, 3, 5, 8)[..., ::2].permute(0, 3, 1, 2),
        torch.randn(5, 3, 4, 2).permute(3, 2, 1, 0),
    ):
        x = x.to(device)
        torch._dynamo.reset()
        compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
        got, want = compiled(x), norm(x)
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last", "transposed"])
def test_numbers_of_samples_that_no_trace_knows_are_compiled(layout, device):
    def step(x, chosen):
        x = x[chosen]
        if layout == "transposed":
            x = x.transpose(2, 3)
        elif layout == "channels-last":
            x = x.to(memory_format=torch.channels_last)
        return fusednorm.group_norm(x, 2) + 1

    x, chosen = torch.randn(3, 4, 2, 5, device=device), torch.tensor([True, False, True], device=device)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y = torch.compile(step, backend="aot_eager", fullgraph=True)(x, chosen)
    torch.testing.assert_close(y, step(x, chosen), check_stride=True)


# Modules and inputs of models.
STRIDED = {
    "pixels": (nn.LayerNorm(8), lambda: torch.randn(2, 8, 3, 5).permute(0, 2, 3, 1)),
    "pixels as tokens": (nn.LayerNorm(8), lambda: torch.randn(2, 8, 3, 5).permute(0, 2, 3, 1).reshape(2, 15, 8)),
    "heads before tokens": (nn.RMSNorm(16), lambda: torch.randn(2, 5, 3, 16).transpose(1, 2)),
    "tokens before samples": (nn.LayerNorm(8), lambda: torch.randn(5, 2, 8).transpose(0, 1)),
    "every other column": (nn.RMSNorm(8), lambda: torch.randn(3, 16)[..., ::2]),
    "heads of a fused projection": (nn.RMSNorm(4), lambda: torch.randn(2, 5, 3, 2, 4)[:, :, 1]),
    "one row for all": (nn.LayerNorm(8), lambda: torch.randn(8).expand(3, 8)),
    "one number for all": (nn.LayerNorm(8), lambda: torch.randn(3, 1).expand(3, 8)),
    "several axes": (nn.LayerNorm((4, 8)), lambda: torch.randn(8, 4, 2).permute(2, 1, 0)),
    "channels after pixels": (nn.GroupNorm(2, 4), lambda: torch.randn(2, 3, 4, 5).transpose(1, 2)),
    "tokens": (nn.GroupNorm(2, 4), lambda: torch.randn(2, 5, 8)[..., :4].transpose(1, 2)),
    "cropped": (nn.GroupNorm(2, 4), lambda: torch.randn(2, 4, 6, 6)[..., 1:5, 1:5]),
    "cropped, channels-last": (
        nn.GroupNorm(2, 4),
        lambda: torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)[..., 1:5, 1:5],
    ),
    "one sample for all": (nn.GroupNorm(2, 4), lambda: torch.randn(1, 4, 6).expand(3, 4, 6)),
    "every other channel": (nn.GroupNorm(2, 4), lambda: torch.randn(2, 8)[:, ::2]),
}


def fused(norm, **options):
    """This library's module in place of torch's, with the same parameters."""
    ours = copy.copy(norm)
    ours.__class__ = KINDS[type(norm)]
    ours.activation = options.get("activation", "none")
    return ours


def results_of(norm, x, dy):
    x = x.detach().requires_grad_()
    y = norm(x)
    return y, *torch.autograd.grad(y, (x, *norm.parameters()), dy)


@pytest.mark.parametrize("case", STRIDED)
def test_strided_inputs_and_gradients_are_what_torch_makes_of_them(case, device, on_kernels):
    norm, make = STRIDED[case]
    norm, x = copy.deepcopy(norm).to(device), make().to(device)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    for dy in (torch.randn_like(x), torch.randn(x.shape[-1:], device=device).expand(x.shape)):
        for got, want in zip(results_of(fused(norm), x, dy), results_of(norm, x, dy), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm of heads", "add_group_norm"])
def test_all_tensors_of_a_call_may_be_strided(name, device, on_kernels):
    x, weight, bias, residual = (tensor.detach() for tensor in inputs(name, device, torch.float32))
    strided = (x.mT.contiguous().mT, *(t.repeat_interleave(2, -1)[..., ::2] for t in (weight, bias, residual)))
    found = []
    for given in ((x, weight, bias, residual), strided):
        leaves = [tensor.requires_grad_() for tensor in given]
        results = tuple(CALLS[name](*leaves))
        of_results = [result.detach() for result in results]
        found.append((*results, *torch.autograd.grad(results, leaves, of_results, allow_unused=True)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["columns", "samples"])
def test_scale_and_shift_may_have_any_strides(which, device, on_kernels):
    x = torch.randn(3, 4, 5, device=device)
    scale, shift = torch.randn(2, 3, 4, device=device)
    wide = torch.stack([scale, scale], -1)[..., 0] if which == "columns" else torch.cat([scale, scale], 1)[:, :4]
    want = fusednorm.group_norm(x, 2, scale=scale, shift=shift)
    torch.testing.assert_close(fusednorm.group_norm(x, 2, scale=wide, shift=shift), want)


def test_only_strides_that_no_kernel_supports_are_copied():
    qkv = torch.randn(2, 5, 3, 2, 4)
    rows, pixels = torch.randn(5, 24), torch.randn(2, 5, 7, 4)
    for op, kept in (("rms_norm", [qkv[:, :, 0], qkv[:, :, 1]]), ("layer_norm", [rows[:, 8:16], rows[:, :8]])):
        assert [t.data_ptr() for t in copy_unsupported_strides(op, *kept)] == [t.data_ptr() for t in kept]
    (samples,) = copy_unsupported_strides("group_norm", pixels.permute(0, 3, 1, 2))
    assert samples.data_ptr() == pixels.data_ptr()
    # Heads need tokens of contiguous heads, of all tensors.
    heads, sliced = copy_unsupported_strides("rms_norm", qkv[:, :, 0], torch.randn(2, 5, 2, 6)[..., :4])
    assert heads.data_ptr() == qkv.data_ptr()
    assert sliced.is_contiguous()
    for heads, cols, is_copied in ((65536, 2, True), (65535, 2, False), (2, 8193, True), (2, 8192, False)):
        (tokens,) = copy_unsupported_strides("rms_norm", torch.empty(2, 2, heads, cols)[:, 0])
        assert tokens.is_contiguous() == is_copied


def test_a_copy_of_samples_has_the_layout_that_torch_chooses():
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    for cropped in (x[..., 1:5, 1:5], x[:, :, ::2], x.transpose(2, 3)[..., 1:], x.expand(2, 4, 6, 6)[:, 1:3]):
        want = nn.functional.group_norm(cropped, 2)
        assert fusednorm.group_norm(cropped, 2).stride() == want.stride()


EMPTY = [
    (nn.LayerNorm(0), (3, 0)),
    (nn.LayerNorm((4, 0)), (2, 4, 0)),
    (nn.LayerNorm(0, elementwise_affine=False), (0, 0)),
    (nn.RMSNorm(0), (2, 3, 0)),
    (nn.RMSNorm(8), (0, 8)),
    (nn.GroupNorm(2, 4), (2, 4, 0)),
    (nn.GroupNorm(2, 4), (0, 4, 3, 0)),
    (nn.GroupNorm(2, 4, affine=False), (2, 4, 3, 0)),
]


@pytest.mark.parametrize("passes", ["cpu", "kernels"])
@pytest.mark.parametrize(("norm", "shape"), EMPTY)
def test_empty_rows_and_groups_have_empty_results(norm, shape, passes, device, request):
    if passes == "kernels":
        request.getfixturevalue("on_kernels")
    norm = fused(copy.deepcopy(norm).to(device))
    x = torch.randn(shape, device=device, requires_grad=True)
    with torch.no_grad():
        assert norm(x).shape == x.shape
    y = norm(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in norm.parameters())


def test_arguments_beside_empty_rows_and_groups_are_checked():
    rows, samples = torch.randn(3, 0), torch.randn(2, 4, 0)
    for call, message in (
        (lambda: fusednorm.layer_norm(rows, torch.ones(1)), r"x \[3, 0\] needs weight \[0\], got \[1\]"),
        (lambda: fusednorm.layer_norm(rows.long()), "x must be float32"),
        (lambda: fusednorm.rms_norm(rows, eps=-1.0), "eps must be at least 0 and finite"),
        (lambda: fusednorm.add_rms_norm(rows, rows[:2]), "residual must have x's shape"),
        (lambda: fusednorm.group_norm(samples, 3), "num_groups must be at least 1 and divide C = 4"),
        (lambda: fusednorm.group_norm(samples, 2, activation="mish"), "activation must be one of"),
        (lambda: fusednorm.group_norm(samples, 2, scale=torch.ones(4)), "needs scale"),
    ):
        with pytest.raises(fusednorm.KernelInputError, match=message):
            call()


@pytest.mark.parametrize("norm", [nn.LayerNorm(8, eps=0.0), nn.RMSNorm(8, eps=0.0), nn.GroupNorm(2, 4, eps=0.0)])
def test_an_eps_of_zero_is_taken(norm, device, on_kernels):
    norm = norm.to(device)
    x = torch.randn(2, 4, 8, device=device)
    x[1] = 0.0
    torch.testing.assert_close(fused(norm)(x), norm(x), rtol=1e-4, atol=1e-4, equal_nan=True)
