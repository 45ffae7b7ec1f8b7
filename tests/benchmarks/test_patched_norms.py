"""What is said of a norm class of another library is what `patch` made of it."""

import csv
import sys
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import patched_norms
from benchmarks.patched_norms import PatchOutcome, try_class
from tests.kernels.api.patching.norms import (
    CohereLayerNorm,
    GatedRMSNorm,
    GroupNormAct,
    LayerNorm1P,
    LayerNorm2d,
    LlamaRMSNorm,
    MaskedRMSNorm,
    NormalizeRMSNorm,
    UnscaledSquareNorm,
    UnweightedRMSNorm,
)


class HeadsNorm(CohereLayerNorm):
    """Constructed with heads and columns alone."""

    def __init__(self, hidden_size):
        heads, cols = hidden_size
        super().__init__((heads, cols))


class PassingNorm(nn.LayerNorm):
    """Names no argument of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class ScalingNorm(nn.Module):
    """Contains a norm, and does something else after it."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, factor):
        return self.norm(x) * factor[:, None]


class VideoNorm(NormalizeRMSNorm):
    """Over the channels of videos; its weight adds an axis to sequences of 32 columns."""

    def __init__(self, dim):
        super().__init__(dim, 1, 1, 1)


class ChoosyNorm(LlamaRMSNorm):
    """Constructed from a file alone."""

    def __init__(self, path):
        super().__init__(len(path.read_bytes()))


class DictionaryNorm(LlamaRMSNorm):
    """Needs a dictionary."""

    def forward(self, x, cache):
        return super().forward(x) * cache["scale"]


class ConvNorm(nn.Sequential):
    """A block around a norm."""

    def __init__(self, dim):
        super().__init__(nn.Conv2d(dim, dim, 1), nn.GroupNorm(4, dim))


class ConditionNorm(nn.Module):
    """Named like a norm, and projects the condition of one."""

    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return self.linear(x)


OUTCOMES = {
    LlamaRMSNorm: PatchOutcome("patched", "rms_norm"),
    LayerNorm1P: PatchOutcome("patched", "layer_norm, weight_offset=1"),
    HeadsNorm: PatchOutcome("patched", "layer_norm"),
    PassingNorm: PatchOutcome("patched", "layer_norm"),
    UnweightedRMSNorm: PatchOutcome("patched", "rms_norm"),
    GroupNormAct: PatchOutcome("patched", "group_norm with relu"),
    LayerNorm2d: PatchOutcome("patched", "layer_norm, layout=nchw"),
    VideoNorm: PatchOutcome("patched", "rms_norm, layout=nchw"),
    MaskedRMSNorm: PatchOutcome("patched", "rms_norm"),
    ScalingNorm: PatchOutcome("inside", "layer_norm"),
    GatedRMSNorm: PatchOutcome("skipped", "multiplies by gate, which no kernel does"),
    UnscaledSquareNorm: PatchOutcome("skipped", "computes neither rms_norm nor layer_norm"),
    ChoosyNorm: PatchOutcome("untried", "its constructor needs other arguments"),
    DictionaryNorm: PatchOutcome("untried", "its forward needs other arguments"),
    ConvNorm: None,
    ConditionNorm: None,
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_the_outcome_of_a_class(kind):
    assert try_class(kind) == OUTCOMES[kind]


@pytest.mark.parametrize("change", ["value", "dtype"])
def test_a_patched_class_that_computes_something_else_is_found(change, monkeypatch):
    compute = patched_norms.fusednorm.patch

    def patch_wrongly(module):
        report = compute(module)
        right = module.forward

        def forward(x):
            return right(x) * 1.01 if change == "value" else right(x).double()

        module.forward = forward
        return report

    monkeypatch.setattr(patched_norms.fusednorm, "patch", patch_wrongly)
    assert try_class(LlamaRMSNorm).outcome == "differs"


def test_a_patched_class_that_the_library_does_not_compute_is_not_counted(monkeypatch):
    compute = patched_norms.fusednorm.patch

    def patch_in_vain(module):
        report = compute(module)
        module.forward = partial(type(module).forward, module)
        return report

    monkeypatch.setattr(patched_norms.fusednorm, "patch", patch_in_vain)
    assert try_class(LlamaRMSNorm) == PatchOutcome("skipped", "patched for calls with hidden_states alone")


MODULE = """
import torch
from torch import nn
from torch.nn import LayerNorm

class ScaledNorm(nn.RMSNorm):
    def __init__(self, dim):
        super().__init__(dim, eps=1e-6)

class Attention(nn.Module):
    pass
"""


def test_a_row_for_each_norm_class_of_a_library(tmp_path, monkeypatch):
    folder = tmp_path / "model_zoo" / "layers"
    folder.mkdir(parents=True)
    for file in (folder.parent / "__init__.py", folder / "__init__.py"):
        file.write_text("")
    (folder / "norms.py").write_text(MODULE)
    (folder / "broken.py").write_text("import of_no_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(patched_norms, "PACKAGES", {"model_zoo": ("model_zoo.layers",)})
    monkeypatch.setattr(patched_norms, "version", lambda library: "1.2.3")
    monkeypatch.setattr(sys, "argv", ["patched_norms", "--out", str(tmp_path / "out.csv")])
    patched_norms.main()
    with (tmp_path / "out.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["torch"] == torch.__version__
    assert {name: row[name] for name in patched_norms.COLUMNS} == {
        "library": "model_zoo",
        "version": "1.2.3",
        "module": "model_zoo.layers.norms",
        "class": "ScaledNorm",
        "outcome": "patched",
        "detail": "rms_norm",
    }
