import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from benchmarks.models.norm_providers import NothingReplacedError, patch_norms, replace_with_liger


class FakeNorm(nn.Module):
    """Liger's constructors, as far as they are used."""

    def __init__(self, size, eps, bias=False):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), None, eps
        if bias:
            self.bias = nn.Parameter(torch.zeros(size))


class LlamaRMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(4)), 1e-3


@pytest.fixture
def liger(monkeypatch):
    for stem, name in (("layer_norm", "LigerLayerNorm"), ("rms_norm", "LigerRMSNorm")):
        module = ModuleType(stem)
        setattr(module, name, type(name, (FakeNorm,), {}))
        monkeypatch.setitem(sys.modules, f"liger_kernel.transformers.{stem}", module)
    for package in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))


def test_ligers_modules_have_the_parameters_of_those_they_replace(liger):
    inner = nn.Sequential(LlamaRMSNorm(), nn.GroupNorm(1, 4))
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-4), inner, nn.LayerNorm(4, bias=False))
    weight, bias, rms_weight = model[0].weight, model[0].bias, inner[0].weight
    replace_with_liger(model)
    assert [type(module).__name__ for module in (*model, *inner)] == [
        "LigerLayerNorm",
        "Sequential",
        "LayerNorm",
        "LigerRMSNorm",
        "GroupNorm",
    ]
    assert model[0].weight is weight
    assert model[0].bias is bias
    assert inner[0].weight is rms_weight
    assert (model[0].eps, inner[0].eps) == (1e-4, 1e-3)


def test_a_model_without_such_norms_is_none_of_ligers(liger):
    with pytest.raises(NothingReplacedError):
        replace_with_liger(nn.Sequential(nn.GroupNorm(1, 4)))


def test_a_model_that_has_no_norm_is_none_of_fusednorms():
    with pytest.raises(NothingReplacedError, match="replaced nothing"):
        patch_norms(nn.Sequential(nn.Linear(4, 4)))
