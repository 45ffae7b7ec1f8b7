import sys
from types import ModuleType

import pytest
import torch.nn.functional as F  # noqa: N812

from benchmarks.harness.oracle import ResultOracle
from benchmarks.providers.registry import PROVIDERS

PEERS = ("liger", "liger_cute", "quack", "helion", "helion_pretuned", "tutorial")


@pytest.mark.parametrize(
    ("op", "pass_", "variant"),
    [
        ("layer_norm", "forward", "silu"),
        ("layer_norm", "backward", "dropout"),
        ("layer_norm", "forward", "float8"),
        ("layer_norm", "forward", "chain"),
        ("rms_norm", "backward", "residual_float32"),
        ("group_norm", "forward", "silu"),
    ],
)
@pytest.mark.parametrize("provider", PEERS)
def test_peers_decline_what_they_do_not_have(problem, provider, op, pass_, variant):
    shape, groups = ((2, 8, 4, 4), 4) if op == "group_norm" else ((6, 256), 0)
    assert PROVIDERS[provider](problem(op, pass_, variant, shape=shape, groups=groups)) is None


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("provider", PEERS)
def test_peers_decline_norms_over_channels(problem, provider, op, layout):
    assert PROVIDERS[provider](problem(op, shape=(2, 8, 4, 4), layout=layout)) is None


@pytest.mark.parametrize("variant", ["adaptive", "gated"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("provider", PEERS)
def test_peers_decline_parameters_of_samples(problem, provider, op, variant):
    assert PROVIDERS[provider](problem(op, variant=variant, shape=(2, 3, 64), layout="samples")) is None


def test_heads_with_parameters_of_their_own_are_quack_s_in_rms_norm_alone(problem, monkeypatch):
    quack = ModuleType("quack.rmsnorm")
    quack.rmsnorm_fwd, quack.rmsnorm_bwd = (lambda x, *_, **__: (x, x, x)), (lambda x, *_: (x, x, None, None))
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", quack)
    for pass_, count in (("forward", 1), ("backward", 2)):
        heads = {"pass_": pass_, "variant": "per_head", "shape": (6, 3, 64), "layout": "heads"}
        assert len(PROVIDERS["quack"](problem("rms_norm", **heads)).call()) == count
        assert PROVIDERS["quack"](problem("layer_norm", **heads)) is None
        assert PROVIDERS["liger"](problem("rms_norm", **heads)) is None


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_liger_s_functions_are_asked_for_cute_kernels(problem, monkeypatch, op):
    def normalise(x, *parameters, eps, impl):
        assert impl == "nvidia-cutedsl"
        return getattr(F, op)(x, x.shape[-1:], *parameters, eps=eps)

    functional = ModuleType("liger_kernel.functional")
    setattr(functional, op, normalise)
    package = ModuleType("liger_kernel")
    package.functional = functional
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    for pass_ in ("forward", "backward"):
        of_rows = problem(op, pass_)
        assert ResultOracle(of_rows).measure_error(PROVIDERS["liger_cute"](of_rows)) < 1e-5
