import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.harness.oracle import ResultOracle
from benchmarks.providers.registry import PROVIDERS
from benchmarks.workload.problems import EPS


def _layer_norm_fwd(x, normalized_shape, weight, bias=None, eps=1e-5):
    return F.layer_norm(x, normalized_shape, weight, bias, eps), None, None


def _layer_norm_bwd(grad_out, x, mean, rstd, weight, compute_bias_grad=True):
    return torch.ops.aten.native_layer_norm_backward(
        grad_out, x, x.shape[1:], mean[:, None], rstd[:, None], weight, weight, [True, True, compute_bias_grad]
    )


def _rms_norm_fwd(x, weight, eps=1e-5):
    return F.rms_norm(x, x.shape[1:], weight, eps), None


def _rms_norm_bwd(grad_out, x, weight, rsqrt):
    scaled, normalised = grad_out * weight, x * rsqrt
    dx = rsqrt * (scaled - normalised * (scaled * normalised).mean(dim=1, keepdim=True))
    return dx, (grad_out * normalised).sum(dim=0)


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    """Modules of Helion's repository, whose kernels are torch's functions."""
    kernels = {
        "examples.layer_norm": {"layer_norm_fwd": _layer_norm_fwd, "layer_norm_bwd": _layer_norm_bwd},
        "examples.rms_norm": {"rms_norm_fwd": _rms_norm_fwd, "rms_norm_bwd": _rms_norm_bwd},
        "pretuned_kernels.layer_norm.layer_norm": {
            "layer_norm": lambda x, weight, bias: F.layer_norm(x, x.shape[1:], weight, bias, EPS)
        },
        "pretuned_kernels.rms_norm.rms_norm": {"rms_norm": lambda *arguments: _rms_norm_fwd(*arguments)[0]},
    }
    for name, functions in kernels.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_results_are_those_of_the_pass(problem, op, pass_):
    of_rows = problem(op, pass_)
    assert ResultOracle(of_rows).measure_error(PROVIDERS["helion"](of_rows)) < 1e-5


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_published_configurations_are_of_forward_passes(problem, op):
    of_rows = problem(op)
    assert ResultOracle(of_rows).measure_error(PROVIDERS["helion_pretuned"](of_rows)) < 1e-5
    assert PROVIDERS["helion_pretuned"](problem(op, "backward")) is None


def test_a_backward_pass_does_not_tune_the_forward_pass(problem, monkeypatch):
    monkeypatch.delattr(sys.modules["examples.layer_norm"], "layer_norm_fwd")
    assert len(PROVIDERS["helion"](problem(pass_="backward")).call()) == 3
