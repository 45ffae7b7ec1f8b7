"""Differentiable calls that the host extension makes: gradients of the passes, and Python where it must be."""

import gc
from itertools import product

import fusednorm
import pytest
import torch
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch import replay_cache
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from tests.kernels.api.norm_calls import Dispatched
from tests.sampling import mark_rest_slow

# Its driver stands in for one that is absent; test_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")

ROWS, COLS, GROUPS = 5, 48, 4


class Norm:
    """A norm over tensors of its own, and what its passes make of them."""

    def __init__(self, op, residual=None, **options):
        self.op, self.options = op, options
        grouped = op == "group_norm"
        shape, size = ((2, 16, 5, 7), 16) if grouped else ((ROWS, COLS), COLS)
        self.x, self.dy = torch.randn(shape), torch.randn(shape)
        self.residual = torch.randn(shape).to(residual) if residual else None
        self.parameters = [torch.randn(size) for _ in range(1 if op == "rms_norm" else 2)]
        self.groups = (GROUPS,) if grouped else ()
        self.leaves = [t for t in (self.x, self.residual, *self.parameters) if t is not None]

    def passes(self, outside=None):
        """y, residual_out, and the gradients of the leaves."""
        residual = self.residual
        forward = getattr(fusednorm, f"{self.op}_forward")
        made = forward(self.x, *self.groups, *self.parameters, residual=residual, stats=True, **self.options)
        forward(self.x, *self.groups, *self.parameters, residual=residual, **self.options)
        back = self.backward(made, dresidual_out=outside)
        dresidual = [] if residual is None else [back.dresidual.to(residual.dtype)]
        return (
            made.y,
            made.residual_out,
            [back.dx, *dresidual, *[d for d in (back.dweight, back.dbias) if d is not None]],
        )

    def backward(self, made, **options):
        """The gradients, by the statistics of a forward pass."""
        saved = {"rstd": made.rstd} | ({} if self.op == "rms_norm" else {"mean": made.mean})
        inputs = self.dy, self.x, *self.groups, *self.parameters
        options |= self.options
        return getattr(fusednorm, f"{self.op}_backward")(*inputs, residual=self.residual, **saved, **options)

    def __call__(self):
        if self.residual is None:
            return getattr(fusednorm, self.op)(self.x, *self.groups, *self.parameters, **self.options), None
        return getattr(fusednorm, f"add_{self.op}")(
            self.x, self.residual, *self.groups, *self.parameters, **self.options
        )


OPS = ("layer_norm", "rms_norm", "group_norm")


def known(natively, norm, outside=None):
    """What the passes make of a norm; afterwards the extension knows its calls, and runs them."""
    wanted = norm.passes(outside)
    natively.runs = True
    for leaf in norm.leaves:
        leaf.requires_grad_()
    return wanted


@pytest.mark.parametrize(
    ("options", "residual", "op"),
    mark_rest_slow(
        product(
            [{}, {"activation": "silu", "eps": 1e-3}, {"activation": "leaky_relu", "negative_slope": -0.75}],
            [None, torch.float32, torch.float16],
            OPS,
        )
    ),
)
def test_gradients_are_those_of_the_passes(options, residual, op, natively, poisoned):
    norm = Norm(op, residual, **options)
    y, residual_out, gradients = known(natively, norm)
    norm()  # Tells the extension what such a call consists of.
    natively.launched.clear()
    got, added = norm()
    assert natively.launched
    assert got.grad_fn.name() == "FusedNormBackward"
    natively.launched.clear()
    found = torch.autograd.grad(got, norm.leaves, norm.dy)
    assert natively.launched
    for one, other in zip((got, *found), (y, *gradients), strict=True):
        assert torch.equal(one, other)
    assert (added is None) == (residual_out is None)
    assert added is None or torch.equal(added, residual_out)


@pytest.mark.parametrize("op", OPS[:2])
@pytest.mark.parametrize("of_residual", [torch.float32, torch.float16])
def test_gradients_of_samples_are_those_of_the_passes(of_residual, op, natively, poisoned):
    x, dy, outside = torch.randn(3, 2, ROWS, COLS)
    residual = torch.randn(2, ROWS, COLS).to(of_residual)
    shift, scale, gate = (each.detach() for each in torch.randn(2, 6 * COLS).chunk(6, -1)[:3])
    of_samples = {"scale": scale, "shift": shift, "gate": gate}
    forward, backward, call = (
        getattr(fusednorm, name) for name in (f"{op}_forward", f"{op}_backward", f"add_{op}")
    )
    forward(x, residual=residual, **of_samples)
    made = forward(x, residual=residual, stats=True, **of_samples)
    saved = {"rstd": made.rstd} if op == "rms_norm" else {"mean": made.mean, "rstd": made.rstd}
    saved |= {"dresidual_out": outside.to(of_residual), "parameter_gradients": False}
    wanted = backward(dy, x, residual=residual, **saved, **of_samples)
    natively.runs = True
    leaves = [each.requires_grad_() for each in (x, residual, scale, shift, gate)]
    call(x, residual, **of_samples)  # Tells the extension what such a call consists of.
    y, added = call(x, residual, **of_samples)
    assert y.grad_fn.name() == "FusedNormBackward"
    natively.launched.clear()
    found = torch.autograd.grad((y, added), leaves, (dy, saved["dresidual_out"]))
    assert natively.launched
    gradients = wanted.dx, wanted.dresidual, wanted.dscale, wanted.dshift, wanted.dgate
    for one, other in zip((y, added, *found), (made.y, made.residual_out, *gradients), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", OPS)
def test_results_may_be_changed_in_place(op, natively):
    norm = Norm(op, torch.float32)
    known(natively, norm)
    norm()
    wanted = torch.autograd.grad([(t + 0.5).relu() for t in norm()], norm.leaves, [norm.dy, norm.dy])
    assert norm()[0].grad_fn.name() == "FusedNormBackward"
    found = torch.autograd.grad([t.add_(0.5).relu_() for t in norm()], norm.leaves, [norm.dy, norm.dy])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_of_the_sum_is_added(op, natively, poisoned):
    norm = Norm(op, torch.float32)
    outside = torch.randn(norm.x.shape)
    *_, gradients = known(natively, norm, outside)
    norm()
    got, added = norm()
    found = torch.autograd.grad((got, added), norm.leaves, (norm.dy, outside))
    assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))


def test_where_nothing_is_differentiated_nothing_is_saved(natively, poisoned):
    norm = Norm("layer_norm")
    y, _, _ = known(natively, norm)
    norm()
    with torch.no_grad():
        natively.launched.clear()
        got, _ = norm()
    assert natively.launched
    assert got.grad_fn is None
    assert torch.equal(got, y)


def test_gradients_that_lie_otherwise_go_through_python(natively, poisoned):
    norm = Norm("layer_norm")
    known(natively, norm)
    norm()
    y, _ = norm()
    found = torch.autograd.grad(y.sum(), norm.leaves)
    norm.dy = torch.ones(ROWS, COLS)
    for leaf in norm.leaves:
        leaf.requires_grad_(False)
    for one, other in zip(found, norm.passes()[-1], strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivatives_are_those_of_the_operators(natively, poisoned):
    norm = Norm("layer_norm")
    known(natively, norm)
    norm()
    y, _ = norm()
    assert y.grad_fn.name() == "FusedNormBackward"
    plain = torch.nn.functional.layer_norm(norm.x, (COLS,), *norm.parameters)
    seconds = []
    for result in (y, plain):
        (first,) = torch.autograd.grad(result, norm.x, norm.dy, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), norm.x)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-4)


def test_saved_tensors_are_hooked_freed_and_guarded(natively, poisoned):
    norm = Norm("layer_norm")
    known(natively, norm)
    norm()
    packed = []
    with saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, lambda place: packed[place]):
        y, _ = norm()
    assert len(packed) == 5
    y.backward(norm.dy, retain_graph=True)
    y.backward(norm.dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(norm.dy)
    y, _ = norm()
    with torch.no_grad():
        norm.parameters[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(norm.dy)


def test_frozen_parameters_get_no_gradient(natively, poisoned):
    norm = Norm("layer_norm")
    known(natively, norm)
    norm.parameters[0].requires_grad_(False)
    norm()
    y, _ = norm()
    y.backward(norm.dy)
    assert norm.parameters[0].grad is None
    assert norm.parameters[1].grad is not None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["watched", "transformed", "of a subclass", "with tangents", "compiled"])
def test_whoever_observes_sees_the_operators(how, natively, poisoned):
    norm = Norm("layer_norm")
    known(natively, norm)
    norm()
    natively.launched.clear()
    if how == "watched":
        with Dispatched() as seen:
            norm()
        assert "fusednorm::layer_norm" in seen.names
    elif how == "transformed":
        torch.func.vmap(lambda x: fusednorm.layer_norm(x, *norm.parameters))(norm.x[None].detach())
        torch.func.grad(lambda x: fusednorm.layer_norm(x, *norm.parameters).sum())(norm.x.detach())
    elif how == "of a subclass":
        norm.x = norm.x.detach().as_subclass(type("Subclass", (torch.Tensor,), {}))
        norm()
    elif how == "with tangents":
        with forward_ad.dual_level():
            norm.x = forward_ad.make_dual(norm.x.detach(), norm.dy)
            assert forward_ad.unpack_dual(norm()[0]).tangent.abs().sum() > 0
    else:
        torch.compile(lambda: norm()[0], backend="eager", fullgraph=True)()
    assert not natively.launched


def test_an_activation_that_is_none_is_refused(natively):
    norm = Norm("layer_norm")
    known(natively, norm)
    norm()
    for activation in ("mish", ["silu"]):
        with pytest.raises(fusednorm.KernelInputError):
            fusednorm.layer_norm(norm.x, *norm.parameters, activation=activation)


def test_a_differentiated_copy_does_not_outlive_its_graph(natively, poisoned):
    norm = Norm("layer_norm")
    known(natively, norm)
    norm()
    y, _ = norm()
    reference = torch.utils.weak.WeakTensorKeyDictionary()
    reference[norm.x] = None
    del y
    norm.x = norm.leaves = None
    natively.compiled.clear()
    replay_cache.clear_replays()
    gc.collect()
    assert not len(reference)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("op", OPS)
def test_strided_and_nested_inputs_go_through_python(op, natively, poisoned):
    norm = Norm(op)
    known(natively, norm)
    norm()
    y, _ = norm()
    natively.launched.clear()
    contiguous = norm.x.detach()
    norm.x = contiguous.repeat_interleave(2, -1)[..., ::2].requires_grad_()
    strided, _ = norm()
    torch.testing.assert_close(strided, y, rtol=1e-4, atol=1e-4)
    (got,), (want,) = (
        torch.autograd.grad(result, x, norm.dy) for result, x in ((strided, norm.x), (y, norm.leaves[0]))
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    norm.x = torch.nested.nested_tensor(list(contiguous))
    with pytest.raises(fusednorm.KernelInputError, match="a nested x must have the layout"):
        norm()


@pytest.mark.parametrize("op", OPS)
def test_a_batch_of_gradients_goes_through_python(op, natively, poisoned):
    norm = Norm(op)
    known(natively, norm)
    norm()
    y, _ = norm()
    assert y.grad_fn.name() == "FusedNormBackward"
    of_y = torch.stack([norm.dy, 2 * norm.dy])
    found = torch.autograd.grad(y, norm.leaves, of_y, retain_graph=True, is_grads_batched=True)
    for scale, gradients in zip((1, 2), zip(*found, strict=True), strict=True):
        wanted = torch.autograd.grad(y, norm.leaves, scale * norm.dy, retain_graph=True)
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_none_are_computed_of_frozen_parameters(op, natively, poisoned):
    norm = Norm(op)
    known(natively, norm)
    made = getattr(fusednorm, f"{op}_forward")(norm.x, *norm.groups, *norm.parameters, stats=True)
    dx = norm.backward(made, parameter_gradients=False).dx
    for parameter in norm.parameters:
        parameter.requires_grad_(False)
    norm()
    y, _ = norm()
    assert y.grad_fn.name() == "FusedNormBackward"
    natively.launched.clear()
    (got,) = torch.autograd.grad(y, norm.x, norm.dy)
    assert torch.equal(got, dx)
    # Nothing is reduced.
    assert len(natively.launched) == 1
