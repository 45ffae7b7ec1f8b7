"""What recognising a norm leaves behind, which its owner does not see, and what is kept: one result for a class."""

import gc
import warnings
import weakref

import fusednorm
import pytest
import torch
from torch import nn

from tests.kernels.api.patching.norms import LayerNorm2d, LlamaRMSNorm, varied


def test_looking_draws_no_random_numbers_and_calls_no_hooks(device):
    norm = varied(LlamaRMSNorm(8)).to(device)
    weight = norm.weight.detach().clone()
    norm.register_forward_hook(lambda *_: pytest.fail("called"))
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert fusednorm.patch(norm).patched
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(norm.weight, weight)
    assert norm.weight.grad is None


@pytest.mark.parametrize("kind", [LlamaRMSNorm, LayerNorm2d])
def test_inference_mode_hides_no_norm(kind):
    with torch.inference_mode():
        assert fusednorm.patch(kind(8)).patched


def make_counting_class(calls):
    class CountingNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            calls.append(hidden_states.shape)
            return super().forward(hidden_states)

    return CountingNorm


def test_norms_of_one_kind_are_tried_once():
    calls = []
    kind = make_counting_class(calls)
    assert set(fusednorm.patch(nn.Sequential(kind(8), kind(8))).patched) == {"0", "1"}
    count = len(calls)
    assert fusednorm.patch(kind(8)).patched
    assert len(calls) == count
    for other in (kind(16), kind(8, eps=1e-3), kind(8).eval()):
        assert fusednorm.patch(other).patched
        assert len(calls) > count
        count = len(calls)


def test_a_class_whose_forward_is_replaced_is_tried_again(monkeypatch):
    kind = make_counting_class([])
    assert fusednorm.patch(kind(8)).patched
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * LlamaRMSNorm.forward(self, x))
    assert fusednorm.patch(kind(8)).skipped == {"": "CountingNorm computes neither rms_norm nor layer_norm"}


def test_a_class_is_not_kept_alive():
    kind = make_counting_class([])
    assert fusednorm.patch(kind(8)).patched
    alive = weakref.ref(kind)
    del kind
    gc.collect()
    assert alive() is None


class TalkativeNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        warnings.warn("such dtypes are slow", stacklevel=2)
        return super().forward(hidden_states)


def test_what_is_tried_warns_nobody(device):
    assert fusednorm.patch(TalkativeNorm(64).to(device)).patched
