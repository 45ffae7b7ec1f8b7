"""The differentiable operators and modules, on the CPU where they run on the oracle and on a GPU on the kernels."""

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm.epilogue import ACTIVATIONS
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode


def random(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


CALLS = {
    "layer_norm": lambda x, w, b, r, **options: fusednorm.layer_norm(x, w, b, **options),
    "rms_norm": lambda x, w, b, r, **options: fusednorm.rms_norm(x, w, **options),
    "layer_norm around zero": lambda x, w, b, r: fusednorm.layer_norm(x, w, b, weight_offset=1.0),
    "layer_norm of heads": lambda x, w, b, r: fusednorm.layer_norm(x, w, b),
    "add_rms_norm of heads": lambda x, w, b, r: fusednorm.add_rms_norm(x, r, w),
    "group_norm": lambda x, w, b, r, **options: fusednorm.group_norm(x, 2, w, b, **options),
    "add_layer_norm": lambda x, w, b, r, **options: fusednorm.add_layer_norm(x, r, w, b, **options),
    "add_rms_norm": lambda x, w, b, r, **options: fusednorm.add_rms_norm(x, r, w, **options),
    "add_group_norm": lambda x, w, b, r, **options: fusednorm.add_group_norm(x, r, 2, w, b, **options),
}


def inputs(name, device="cpu", dtype=torch.float64):
    shape = (2, 4, 3) if "group" in name else (2, 3, 4) if "heads" in name else (3, 4)
    parameter = (3, 4) if "heads" in name else (4,)
    return [random(*s, device=device, dtype=dtype) for s in (shape, parameter, parameter, shape)]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_match_finite_differences(name):
    call = CALLS[name]
    assert torch.autograd.gradcheck(lambda *t: call(*t), inputs(name))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_through_activation_and_dropout_match_finite_differences(activation):
    def call(x, w, b, r):
        return fusednorm.add_layer_norm(x, r, w, b, activation=activation, dropout=0.3, seed=5)

    assert torch.autograd.gradcheck(call, inputs("add_layer_norm"))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm"])
def test_operators_keep_torchs_contract(op):
    x, w, b, r = inputs(op, dtype=torch.float32)
    bias = None if op == "rms_norm" else b
    operator = getattr(torch.ops.fusednorm, op).default
    torch.library.opcheck(operator, (x, w, bias, r, 2, 1e-5, float(op != "group_norm"), "silu", 0.0, 0))
    torch.library.opcheck(operator, (x, None, None, None, 2, 1e-5, 0.0, "silu", 0.0, 0))
    if op != "group_norm":
        x, w, b, r = inputs("heads", dtype=torch.float32)
        bias = None if op == "rms_norm" else b
        torch.library.opcheck(operator, (x, w, bias, r, 0, 1e-5, 0.0, "none", 0.0, 0))
    stream = r.detach().half().requires_grad_()
    torch.library.opcheck(operator, (x, w, bias, stream, 2, 1e-5, 0.0, "none", 0.0, 0))


@pytest.mark.parametrize("name", CALLS)
def test_compiles_whole_and_only_once_for_all_numbers_of_rows(name, device):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(x, w, b, r):
        result = CALLS[name](x, w, b, r)
        return result.sum() if isinstance(result, torch.Tensor) else result.y.sum() + result.residual_out.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=True)
    for rows in (5, 7, 9):
        x, w, b, r = inputs(name, device, torch.float32)
        x = torch.randn(rows, *x.shape[1:], device=device, requires_grad=True)
        r = torch.randn_like(x)
        torch.testing.assert_close(compiled(x, w, b, r), step(x, w, b, r))
        compiled(x, w, b, r).backward()
        assert x.grad.shape == x.shape
    assert len(graphs) == 1


def test_expanded_gradients_are_taken(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    fusednorm.layer_norm(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros_like(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm", "add_group_norm"])
def test_each_input_gets_its_gradient_in_its_own_dtype(name, device):
    x, w, b, r = inputs(name, device, torch.float32)
    half, stream = (t.detach().clone().requires_grad_() for t in (x.bfloat16(), r))
    h = half.float() + stream
    want = CALLS[name.removeprefix("add_")](h, w, b, r)
    y, residual_out = CALLS[name](half, w, b, stream)
    assert residual_out.dtype == (torch.bfloat16 if "group" in name else torch.float32)
    torch.testing.assert_close(y.float(), want, rtol=2**-7, atol=2**-7)
    torch.autograd.backward([y, residual_out], [torch.ones_like(y), torch.ones_like(residual_out)])
    (right,) = torch.autograd.grad([want, h], [stream], [torch.ones_like(want), torch.ones_like(h)])
    assert (half.grad.dtype, stream.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(half.grad.float(), right, rtol=2**-7, atol=1e-4)
    tolerance = 2**-7 if "group" in name else 1e-5
    torch.testing.assert_close(stream.grad, right, rtol=tolerance, atol=1e-4)


def test_only_the_sum_may_be_used(device):
    x, r = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    fusednorm.add_rms_norm(x, r).residual_out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(r.grad, torch.ones_like(r))


@pytest.mark.parametrize("name", CALLS)
def test_float8_is_not_differentiated(name, device):
    x, w, b, r = (t.detach() for t in inputs(name, device, torch.float32))
    with pytest.raises(fusednorm.KernelInputError, match="x must be float32, float16, bfloat16 or float64, got"):
        CALLS[name](x.to(torch.float8_e4m3fn), w, b, r)


MODULES = [
    (nn.LayerNorm, fusednorm.LayerNorm, ((4, 6),), (5, 4, 6)),
    (nn.LayerNorm, fusednorm.LayerNorm, (16,), (2, 3, 16)),
    (nn.RMSNorm, fusednorm.RMSNorm, (16,), (5, 16)),
    (nn.GroupNorm, fusednorm.GroupNorm, (2, 6), (3, 6, 4, 4)),
]


@pytest.mark.parametrize(("theirs", "ours", "arguments", "shape"), MODULES)
def test_modules_are_drop_ins(theirs, ours, arguments, shape, device):
    torch_module, module = theirs(*arguments, device=device), ours(*arguments, device=device)
    for parameter in torch_module.parameters():
        nn.init.normal_(parameter)
    module.load_state_dict(torch_module.state_dict())
    assert repr(module) == repr(torch_module)
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(module(x), torch_module(x))
    fused = ours(*arguments, device=device, activation="silu")
    fused.load_state_dict(torch_module.state_dict())
    torch.testing.assert_close(fused(x), F.silu(torch_module(x)))
    assert "activation='silu'" in repr(fused)


@pytest.mark.parametrize("ours", [fusednorm.LayerNorm, fusednorm.RMSNorm])
def test_modules_with_a_weight_around_zero_start_as_the_same_function(ours, device):
    plain, centred = ours(6, device=device), ours(6, device=device, weight_offset=1.0)
    x = torch.randn(3, 6, device=device)
    assert not centred.weight.any()
    torch.testing.assert_close(centred(x), plain(x))
    nn.init.normal_(centred.weight)
    with torch.no_grad():
        plain.weight.copy_(centred.weight + 1)
    torch.testing.assert_close(centred(x), plain(x))
    assert "weight_offset=1.0" in repr(centred)
    with pytest.raises(fusednorm.KernelInputError, match="weight_offset needs a weight"):
        ours(6, elementwise_affine=False, weight_offset=1.0)


def test_modules_without_parameters(device):
    x = torch.randn(3, 6, device=device)
    module = fusednorm.LayerNorm(6, elementwise_affine=False, device=device)
    torch.testing.assert_close(module(x), F.layer_norm(x, (6,)))


class Dispatched(TorchDispatchMode):
    """Notes the operators of this library that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusednorm":
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_the_results_are_the_same(name, device):
    tensors = inputs(name, device, torch.float32)
    with_gradients = CALLS[name](*tensors)
    with torch.no_grad():
        without = CALLS[name](*tensors)
    detached = CALLS[name](*(t.detach() for t in tensors))
    for result in (without, detached):
        assert type(result) is type(with_gradients)
        for got, want in zip(result, with_gradients, strict=True):
            torch.testing.assert_close(got, want.detach())
            assert not got.requires_grad


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_operators_are_seen_by_whoever_looks(name, gradients, device):
    tensors = inputs(name, device, torch.float32)
    with torch.set_grad_enabled(gradients), Dispatched() as seen:
        CALLS[name](*tensors)
    assert seen.names == [f"fusednorm::{name.removeprefix('add_').split()[0]}"]


@pytest.mark.parametrize("name", CALLS)
def test_shapes_are_found_without_data(name):
    tensors = [t.detach().to("meta", torch.float32) for t in inputs(name)]
    result = CALLS[name](*tensors)
    y = result if isinstance(result, torch.Tensor) else result.y
    assert y.device.type == "meta"
    assert y.shape == tensors[0].shape


def test_inference_compiles_whole_and_traces():
    x, w, b, r = (t.detach().float() for t in inputs("add_layer_norm"))

    def step(x, w, b, r):
        return fusednorm.add_layer_norm(x, r, w, b).y

    with torch.no_grad():
        want = step(x, w, b, r)
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, w, b, r), want)
        assert "fusednorm.layer_norm" in make_fx(step)(x, w, b, r).code
