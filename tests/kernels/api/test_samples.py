"""Adaptive LayerNorm and RMSNorm: the differentiable functions with a scale, shift and gate for each sample.

On a GPU they run on the kernels, for which there is no float64.
"""

from functools import partial

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import KernelInputError

OPS = ("layer_norm", "rms_norm")


def plain(op, x, residual, weight, wide):
    """An adaptive block in torch; the sum too."""
    shift, scale, gate = (each.to(x.dtype)[:, None] for each in wide.chunk(6, -1)[:3])
    h = residual + gate * x
    cols = x.shape[-1:]
    z = F.layer_norm(h, cols, weight, None) if op == "layer_norm" else F.rms_norm(h, cols, weight, 1e-6)
    return z * (1 + scale) + shift, h


def ours(op, x, residual, weight, wide):
    """The same block by this library, with parts of a tensor that are not copied."""
    shift, scale, gate = wide.chunk(6, -1)[:3]
    return getattr(fusednorm, f"add_{op}")(x, residual, weight, scale=scale, shift=shift, gate=gate)


def tensors(dtype=torch.float32, tokens=3, cols=8, **kind):
    shapes = (2, tokens, cols), (2, tokens, cols), (cols,), (2, 6 * cols)
    return [torch.randn(shape, dtype=dtype, **kind).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_it_is_a_norm_before_an_affine_step(op, dtype, device):
    x, _, weight, wide = tensors(dtype, device="cpu" if dtype == torch.float64 else device)
    shift, scale = wide.chunk(6, -1)[:2]
    y = getattr(fusednorm, op)(x, weight, scale=scale, shift=shift)
    dy = torch.randn_like(y)
    exact = [each.detach().double().requires_grad_() for each in (x, weight, wide)]
    without_gate = torch.cat([exact[2][:, :16], torch.ones_like(exact[2][:, 16:])], -1)
    without = torch.zeros_like(exact[0]), exact[1], without_gate
    right, _ = plain(op, exact[0], *without)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.double(), right, **tolerance)
    found = torch.autograd.grad(y, (x, weight, wide), dy)
    for gradient, exact_gradient in zip(found, torch.autograd.grad(right, exact, dy.double()), strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, **tolerance)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float16)])
@pytest.mark.parametrize("op", OPS)
def test_after_a_gated_addition(op, dtypes, device):
    given = tensors(device=device)
    given = [
        each.detach().to(dtype).requires_grad_()
        for each, dtype in zip(
            given, (*dtypes, torch.bfloat16 if dtypes[1] != dtypes[0] else dtypes[2]), strict=True
        )
    ]
    y, h = ours(op, *given)
    assert (y.dtype, h.dtype) == dtypes[:2]
    outside = torch.randn_like(y), torch.randn_like(h)
    found = torch.autograd.grad((y, h), given, outside)
    exact = [each.detach().double().requires_grad_() for each in given]
    right = plain(op, *exact)
    tolerance = {"rtol": 2e-2, "atol": 4e-2} if torch.bfloat16 in dtypes else {"rtol": 1e-5, "atol": 1e-5}
    for result, exact_result in zip((y, h), right, strict=True):
        torch.testing.assert_close(result.double(), exact_result, **tolerance)
    gradients = torch.autograd.grad(right, exact, [each.double() for each in outside])
    for gradient, exact_gradient, tensor in zip(found, gradients, given, strict=True):
        assert gradient.dtype == tensor.dtype
        torch.testing.assert_close(gradient.double(), exact_gradient, **tolerance)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op):
    given = tensors(torch.float64, tokens=2, cols=3)
    assert torch.autograd.gradcheck(lambda *each: ours(op, *each), given)
    assert torch.autograd.gradgradcheck(lambda *each: ours(op, *each), given)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:`torch.jit.\\w+` is deprecated:DeprecationWarning")
def test_forward_mode_and_vmap(op):
    given = [each.detach() for each in tensors(torch.float64)]
    tangents = tuple(torch.randn_like(each) for each in given)
    for found, right in zip(
        torch.func.jvp(lambda *each: ours(op, *each), tuple(given), tangents),
        torch.func.jvp(lambda *each: plain(op, *each), tuple(given), tangents),
        strict=True,
    ):
        torch.testing.assert_close(tuple(found), right)
    batches = [torch.stack([each, torch.randn_like(each)]) for each in given]
    found = torch.vmap(lambda *each: tuple(ours(op, *each)))(*batches)
    torch.testing.assert_close(found, torch.vmap(lambda *each: plain(op, *each))(*batches))


def test_torch_compile_has_no_graph_break_and_takes_any_sizes(device):
    torch._dynamo.reset()
    block = partial(ours, "layer_norm")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5):
        given = tensors(tokens=tokens, device=device)
        outside = torch.randn_like(given[0]), torch.randn_like(given[0])
        results = [torch.autograd.grad(tuple(run(*given)), given, outside) for run in (block, compiled)]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(("op", "gated"), [("layer_norm", True), ("rms_norm", False)])
def test_operators_are_consistent(op, gated):
    x, residual, weight, wide = tensors()
    shift, scale, gate = (each.detach().clone().requires_grad_() for each in wide.chunk(6, -1)[:3])
    options = 0, 1e-5, 0.0, "silu", 0.0, 0, 0.01, None
    arguments = (x, weight, None, residual, scale, shift, *options)
    torch.library.opcheck(getattr(torch.ops.fusednorm, op).default, (*arguments, gate) if gated else arguments)


def test_graphs_saved_before_operators_had_a_gate_still_run():
    x = torch.randn(2, 3, 8, requires_grad=True)
    options = 0, 1e-5, 0.0, "none", 0.0, 0
    y = torch.ops.fusednorm.layer_norm(x, None, None, None, None, None, *options)[0]
    torch.testing.assert_close(y, F.layer_norm(x, (8,)))
    statistics = torch.zeros(2, 3), torch.ones(2, 3)
    arguments = torch.ones_like(x), x, None, None, *statistics, None, None, None, None, *options
    assert torch.ops.fusednorm.layer_norm_backward(*arguments)[0].shape == x.shape


@pytest.mark.parametrize("arrange", ["one is wide", "samples are transposed", "between"])
def test_other_strides_are_copied(arrange, device):
    x, residual = torch.randn(2, 2, 3, 4, 8, device=device)
    made = list(torch.randn(3, 2, 3, 8, device=device))
    if arrange == "one is wide":
        made[2] = torch.randn(2, 3, 16, device=device)[..., :8]
    elif arrange == "samples are transposed":
        made = [torch.randn(3, 2, 8, device=device).transpose(0, 1) for _ in range(3)]
    else:
        made[1] = torch.randn(2, 3, 1, 16, device=device)[..., :8]
    scale, shift, gate = made
    y, h = fusednorm.add_layer_norm(x, residual, scale=scale, shift=shift, gate=gate)
    scale, shift, gate = (each.reshape(2, 3, 1, 8) for each in made)
    torch.testing.assert_close(h, residual + gate * x)
    torch.testing.assert_close(y, F.layer_norm(h, (8,)) * (1 + scale) + shift, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["scale", "shift", "gate"])
@pytest.mark.parametrize("op", OPS)
def test_a_shape_that_is_not_of_leading_axes(op, name, device):
    x = torch.randn(2, 3, 8, device=device)
    with pytest.raises(KernelInputError, match="leading axes"):
        getattr(fusednorm, f"add_{op}")(x, x, **{name: torch.randn(3, 8, device=device)})


def test_empty_rows(device):
    x, residual = torch.randn(2, 2, 3, 0, device=device, requires_grad=True)
    scale, gate = torch.randn(2, 2, 0, device=device, requires_grad=True)
    y, _ = fusednorm.add_layer_norm(x, residual, scale=scale, gate=gate)
    of_scale, of_gate = torch.autograd.grad(y.sum(), (scale, gate))
    assert of_scale.shape == of_gate.shape == scale.shape


MODULES = {
    "layer_norm": fusednorm.LayerNorm(8, activation="silu"),
    "layer_norm without parameters": fusednorm.LayerNorm(8, elementwise_affine=False),
    "layer_norm of two axes": fusednorm.LayerNorm((2, 4)),
    "rms_norm": fusednorm.RMSNorm(8, eps=1e-6),
    "rms_norm of two axes": fusednorm.RMSNorm((2, 4), eps=1e-6, weight_offset=1.0),
}


@pytest.mark.parametrize("case", MODULES)
@pytest.mark.filterwarnings("ignore:`torch.jit.\\w+` is deprecated:DeprecationWarning")
def test_modules_take_scale_and_shift_at_the_call(case, device):
    norm = MODULES[case].to(device)
    shape = norm.normalized_shape
    x, scale, shift = (torch.randn(*size, *shape, device=device) for size in ((2, 3), (2,), (2, 1)))
    run = getattr(fusednorm, case[: case.index("_norm") + 5])
    activation = norm.activation if case == "layer_norm" else "none"
    weight = None if norm.weight is None else norm.weight.flatten()
    right = run(
        x.flatten(2), weight, scale=scale.flatten(1), shift=shift.flatten(2), activation=activation,
        eps=norm.eps, weight_offset=norm.weight_offset,
    )  # fmt: skip
    torch._dynamo.reset()
    exported = torch.export.export(norm, (x, scale, shift)).module()
    for module in (norm, torch.jit.script(norm), torch.compile(norm, fullgraph=True, backend="eager"), exported):
        torch.testing.assert_close(module(x, scale, shift), right.view(x.shape))
    torch.testing.assert_close(norm(x, shift=shift), norm(x, torch.zeros_like(scale), shift))
    with pytest.raises(KernelInputError):
        norm(x, torch.randn(3, *shape, device=device))


def test_a_module_with_a_scale_follows_autocast_on_the_cpu():
    norm = fusednorm.LayerNorm(8)
    x, scale = torch.randn(2, 3, 8).to(torch.bfloat16), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x, scale).dtype == torch.bfloat16


def test_a_nested_x_has_no_scale():
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(KernelInputError, match="not nested"):
        fusednorm.layer_norm(x, scale=torch.zeros(2, 8))


@pytest.mark.parametrize("op", OPS)
def test_parameters_of_each_head_are_refused(op, device):
    x, weight = torch.randn(2, 3, 4, 8, device=device), torch.ones(4, 8, device=device)
    with pytest.raises(KernelInputError, match="each head"):
        getattr(fusednorm, op)(x, weight, scale=torch.zeros(2, 8, device=device))
