"""LayerNorm and RMSNorm over channels: the differentiable functions, operators and modules with a layout.

On a GPU they run on the kernels, for which there is no float64.
"""

import io

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import KernelInputError
from torch._prims_common import suggest_memory_format

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

OPS = ("layer_norm", "rms_norm")
FORMATS = (torch.contiguous_format, torch.channels_last)


def plain(op, x, weight):
    rows = x.movedim(1, -1)
    cols = rows.shape[-1:]
    y = F.layer_norm(rows, cols, weight) if op == "layer_norm" else F.rms_norm(rows, cols, weight, 1e-6)
    return y.movedim(-1, 1)


def make_tensors(memory_format=torch.contiguous_format, dtype=torch.float32, device="cpu", shape=(2, 6, 3, 4)):
    x = torch.randn(shape, dtype=dtype, device=device).contiguous(memory_format=memory_format)
    return x.requires_grad_(), torch.randn(shape[1], dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_it_is_a_norm_of_rows_of_channels(op, memory_format, dtype, device):
    given = make_tensors(memory_format, dtype, "cpu" if dtype == torch.float64 else device)
    y = getattr(fusednorm, op)(*given, layout="nchw")
    assert y.is_contiguous(memory_format=memory_format)
    dy = torch.randn_like(y)
    exact = [each.detach().double().requires_grad_() for each in given]
    right = plain(op, *exact)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.double(), right, **tolerance)
    found = torch.autograd.grad(y, given, dy)
    assert found[0].is_contiguous(memory_format=memory_format)
    for gradient, exact_gradient in zip(found, torch.autograd.grad(right, exact, dy.double()), strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, **tolerance)


@pytest.mark.parametrize("op", OPS)
def test_other_strides_are_copied_to_the_format_that_torch_suggests(op, device):
    weight = torch.randn(6, device=device)
    for x in (
        torch.randn(2, 6, 4, 3, device=device).transpose(2, 3),
        torch.randn(2, 6, 6, 4, device=device)[:, :, ::2],
        torch.randn(2, 6, 6, 4, device=device).contiguous(memory_format=torch.channels_last)[:, :, ::2],
        torch.randn(2, 9, 3, 4, device=device).contiguous(memory_format=torch.channels_last)[:, :6],
        torch.randn(2, 9, 5, device=device).transpose(1, 2)[:, :, :6].transpose(1, 2),
    ):
        y = getattr(fusednorm, op)(x, weight, layout="nchw")
        torch.testing.assert_close(y, plain(op, x, weight))
        is_last = suggest_memory_format(x) is torch.channels_last
        assert y.is_contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def test_rows_of_three_axes_keep_their_order(device):
    x = torch.randn(2, 5, 6, device=device).transpose(1, 2)
    assert fusednorm.layer_norm(x, layout="nchw").transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (2, 6, 1, 1)])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_ambiguous_strides_keep_the_format_that_torch_suggests(shape, memory_format, device):
    x = torch.randn(shape, device=device).to(memory_format=memory_format)
    y = fusednorm.layer_norm(x, layout="nchw")
    assert suggest_memory_format(y) is suggest_memory_format(x)


def test_a_gradient_of_another_layout_is_copied(device):
    x, weight = make_tensors(device=device)
    y = fusednorm.layer_norm(x, weight, layout="nchw")
    dy = torch.randn_like(y)
    right = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    found = torch.autograd.grad(y, (x, weight), dy.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_after_an_addition(op, memory_format, float_device):
    device, dtype = float_device
    x, weight = make_tensors(memory_format, device=device)
    residual = torch.randn(x.shape, dtype=dtype, device=device)
    y, total = getattr(fusednorm, f"add_{op}")(x, residual, weight, layout="nchw")
    torch.testing.assert_close(total, x + residual)
    assert total.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(y, plain(op, (x + residual).float(), weight))


@pytest.mark.parametrize("op", OPS)
def test_scale_and_shift_of_each_sample(op, device):
    x, weight = make_tensors(device=device)
    scale, shift = torch.randn(2, 6, device=device), torch.randn(2, 6, device=device)
    y = getattr(fusednorm, op)(x, weight, scale=scale, shift=shift, layout="nchw")
    right = plain(op, x, weight) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    torch.testing.assert_close(y, right)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_a_gate_of_each_sample(op, memory_format, device):
    x, weight = make_tensors(memory_format, device=device)
    residual, gate = torch.randn_like(x, requires_grad=True), torch.randn(2, 6, requires_grad=True, device=device)
    given = x, weight, residual, gate
    y, total = getattr(fusednorm, f"add_{op}")(x, residual, weight, gate=gate, layout="nchw")
    h = residual + gate[:, :, None, None] * x
    right = plain(op, h, weight)
    torch.testing.assert_close((y, total), (right, h))
    dy = torch.randn_like(y)
    found, exact = (torch.autograd.grad(each, given, (dy, dy)) for each in ((y, total), (right, h)))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op):
    given = make_tensors(dtype=torch.float64, shape=(2, 3, 1, 2))
    assert torch.autograd.gradgradcheck(lambda *each: getattr(fusednorm, op)(*each, layout="nchw"), given)


@pytest.mark.parametrize(("op", "memory_format"), [*zip(OPS, FORMATS, strict=True)])
def test_torch_compile_has_no_graph_break(op, memory_format, device):
    def block(x, weight):
        return x + getattr(fusednorm, op)(x * 2, weight, activation="silu", layout="nchw")

    given = make_tensors(memory_format, device=device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(given[0])
    results = [torch.autograd.grad(run(*given), given, dy) for run in (block, compiled)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("op", "memory_format", "gated"), [("layer_norm", FORMATS[0], False), ("rms_norm", FORMATS[1], True)]
)
def test_operators_are_consistent(op, memory_format, gated):
    x, weight = make_tensors(memory_format)
    arguments = (x, weight, None, torch.randn_like(x, dtype=torch.float64), None, None)
    options = 0, 1e-5, 0.0, "silu", 0.0, 0, 0.01, "nchw"
    gate = torch.randn(2, 6, requires_grad=True) if gated else None
    torch.library.opcheck(getattr(torch.ops.fusednorm, op).default, (*arguments, *options, gate))


@pytest.mark.parametrize("op", OPS)
def test_vmap_and_forward_derivatives(op, device):
    x, weight = (each.detach() for each in make_tensors(device=device))

    def call(x):
        return getattr(fusednorm, op)(x, weight, layout="nchw")

    xs = torch.stack([x, x + 1])
    torch.testing.assert_close(torch.vmap(call)(xs), torch.stack([call(each) for each in xs]))
    tangent = torch.randn_like(x)
    found, right = (torch.func.jvp(run, (x,), (tangent,))[1] for run in (call, lambda x: plain(op, x, weight)))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_channels_without_elements(device):
    x = torch.randn(2, 0, 3, requires_grad=True, device=device)
    fusednorm.layer_norm(x, layout="nchw").sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("affine", [True, False])
def test_modules(name, affine, device):
    module = getattr(fusednorm, name)(6, eps=1e-6, elementwise_affine=affine, layout="nchw", device=device)
    x = torch.randn(2, 6, 3, 4, device=device)
    op = "layer_norm" if name == "LayerNorm" else "rms_norm"
    right = getattr(fusednorm, op)(x, eps=1e-6, layout="nchw")
    torch.testing.assert_close(module(x), right)
    assert "layout='nchw'" in repr(module)
    assert "layout" not in repr(getattr(fusednorm, name)(6))
    torch.testing.assert_close(torch.jit.script(module)(x), right)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), right)
    with pytest.raises(KernelInputError, match="channels"):
        module(torch.randn(2, 5, 6, device=device))


def test_modules_of_several_axes_have_no_layout():
    with pytest.raises(KernelInputError, match="one axis"):
        fusednorm.LayerNorm((6, 3), layout="nchw")
    with pytest.raises(KernelInputError, match="layout must be"):
        fusednorm.RMSNorm(6, layout="nhwc")


@pytest.mark.parametrize("op", OPS)
def test_one_dimension_has_no_channels(op, device):
    with pytest.raises(KernelInputError, match="N, C"):
        getattr(fusednorm, op)(torch.randn(6, device=device), layout="nchw")


@pytest.mark.parametrize("op", OPS)
def test_an_expanded_x_is_normalised(op, device):
    x = torch.randn(8, device=device).view(1, 8, 1, 1).expand(2, 8, 3, 4)
    y = getattr(fusednorm, op)(x, layout="nchw")
    torch.testing.assert_close(y, getattr(fusednorm, op)(x.contiguous(), layout="nchw"))
