"""The operators as torch.compile, tracers and modes see them, on the CPU and on a GPU."""

import fusednorm
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from tests.kernels.api.norm_calls import CALLS, Dispatched, inputs


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm"])
def test_operators_keep_torchs_contract(op):
    x, w, b, r = inputs(op, dtype=torch.float32)
    bias = None if op == "rms_norm" else b
    operator = getattr(torch.ops.fusednorm, op).default
    torch.library.opcheck(operator, (x, w, bias, r, None, None, 2, 1e-5, float(op != "group_norm"), "silu", 0.0, 0))
    if op != "group_norm":
        x, w, b, r = inputs("heads", dtype=torch.float32)
        bias = None if op == "rms_norm" else b
        torch.library.opcheck(operator, (x, w, bias, r, None, None, 0, 1e-5, 0.0, "none", 0.0, 0))
    stream = r.detach().half().requires_grad_()
    torch.library.opcheck(operator, (x, w, bias, stream, None, None, 2, 1e-5, 0.0, "none", 0.0, 0))


def test_group_norms_operator_takes_scale_and_shift():
    x, w, b, r = inputs("group_norm", dtype=torch.float32)
    scale, shift = torch.randn(2, *x.shape[:2]).unbind()
    operator = torch.ops.fusednorm.group_norm.default
    options = 2, 1e-5, 0.0, "silu", 0.0, 0
    torch.library.opcheck(operator, (x, w, b, r, scale.requires_grad_(), shift.requires_grad_(), *options))
    checks = ["test_faketensor", "test_schema"]
    for given in ((scale, None), (None, shift)):
        torch.library.opcheck(operator, (x, w, b, r, *given, *options), test_utils=checks)


# Of each operation one, of heads and of samples one; `make test-slow` compiles the others.
COMPILED = ("layer_norm", "add_rms_norm", "group_norm", "layer_norm of heads", "add_rms_norm of samples")


@pytest.mark.parametrize(
    "name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
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
    for rows in (5, 7):
        x, w, b, r = inputs(name, device, torch.float32)
        # Samples have that many rows each.
        shape = (x.shape[0], rows, x.shape[2]) if "samples" in name else (rows, *x.shape[1:])
        x = torch.randn(shape, device=device, requires_grad=True)
        r = torch.randn_like(x)
        torch.testing.assert_close(compiled(x, w, b, r), step(x, w, b, r))
        compiled(x, w, b, r).backward()
        assert x.grad.shape == x.shape
    assert len(graphs) == 1


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


class Noting(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self):
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradients", [True, False])
def test_function_modes_see_the_operator(gradients, device):
    x, w, b, _ = inputs("layer_norm", device, torch.float32)
    with torch.set_grad_enabled(gradients), Noting() as noting:
        fusednorm.layer_norm(x, w, b)
    assert "fusednorm.layer_norm" in noting.called


@pytest.mark.parametrize("gradients", [True, False])
def test_a_trace_before_dispatch_holds_the_operator(gradients):
    x = torch.randn(3, 4, requires_grad=gradients)
    trace = make_fx(lambda x: fusednorm.layer_norm(x), pre_dispatch=True)(x)
    assert "fusednorm.layer_norm" in trace.code


def test_results_lie_as_a_trace_says_they_do():
    """Rows contiguous, whatever x's strides: code is generated for the strides of the trace."""
    rows = torch.randn(4, 3).t().requires_grad_()
    groups = torch.randn(2, 3, 5, 4).permute(0, 3, 1, 2).requires_grad_()
    one = torch.empty_strided((2, 4, 1, 1), (4, 1, 4, 4)).normal_().requires_grad_()
    for op, x in (("layer_norm", rows), ("rms_norm", rows), ("group_norm", groups), ("group_norm", one)):
        residual = torch.randn_like(x)
        arguments = (x, None, None, residual, None, None, 2, 1e-5, 0.0, "none", 0.0, 0)
        operator = getattr(torch.ops.fusednorm, op).default
        torch.library.opcheck(operator, arguments, test_utils=["test_faketensor", "test_schema"])
    x = rows.detach()
    assert fusednorm.layer_norm(x).is_contiguous()
    assert fusednorm.reference.layer_norm_backward(x, x).dx.is_contiguous()


@pytest.mark.parametrize("strict", [True, False])
def test_modules_are_exported_whole(strict):
    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList(
                [fusednorm.LayerNorm(4), fusednorm.RMSNorm(4), fusednorm.GroupNorm(2, 4)]
            )

        def forward(self, x):
            for norm in self.norms:
                x = norm(x)
            return x

    stack, x = Stack(), torch.randn(3, 4)
    exported = torch.export.export(stack, (x,), strict=strict)
    names = [str(node.target) for node in exported.graph.nodes if "fusednorm" in str(node.target)]
    assert names == [f"fusednorm.{op}.default" for op in ("layer_norm", "rms_norm", "group_norm")]
    torch.testing.assert_close(exported.module()(x), stack(x))


def test_schemas_are_those_of_saved_graphs():
    settings = (
        "int num_groups, float eps, float weight_offset, str activation, float dropout, SymInt seed, "
        "float negative_slope=0.01, str? layout=None"
    )
    forward = "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift"
    backward = (
        "Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, Tensor? residual, "
        "Tensor? scale, Tensor? shift, Tensor? dresidual_out"
    )
    results = "Tensor y, Tensor mean, Tensor rstd, Tensor residual_out"
    gradients = (
        "Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dscale, Tensor dshift, Tensor dgate"
    )
    # Arguments that operators gained later follow the others, and have defaults.
    later = "Tensor? gate=None"
    for op in ("layer_norm", "rms_norm", "group_norm"):
        name = f"fusednorm::{op}"
        schemas = [str(getattr(torch.ops.fusednorm, each).default._schema) for each in (op, f"{op}_backward")]
        assert schemas == [
            f"{name}({forward}, {settings}, {later}) -> ({results})",
            f"{name}_backward({backward}, {settings}, {later}) -> ({gradients})",
        ]
