"""Which modules are activations that the kernels fuse."""

import pytest
from fusednorm.api.patching.activation_modules import find_activation_name, find_inner_activation, has_hooks
from torch import nn

from tests.kernels.api.patching.norms import LayerNormAct, add_hook, remove_hook


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.Mish(), None),
        (type("Other", (nn.SiLU,), {})(), None),
    ],
)
def test_activations_are_known_by_their_classes(module, name):
    assert find_activation_name(module) == name


def test_an_activation_behind_a_hook_is_another_module():
    module = nn.SiLU()
    add_hook(module)
    assert find_activation_name(module) is None
    remove_hook(module)
    assert find_activation_name(module) == "silu"


@pytest.mark.parametrize(
    ("children", "name"),
    [
        ((nn.Identity(), nn.Identity()), "none"),
        ((nn.ReLU(), nn.Identity()), "relu"),
        ((nn.ReLU(), nn.SiLU()), None),
    ],
)
def test_a_norm_has_at_most_one_activation(children, name):
    norm = LayerNormAct(8)
    norm.drop, norm.act = children
    assert find_inner_activation(norm) == name
    assert find_inner_activation(nn.LayerNorm(8)) == "none"


def test_hooks_are_seen():
    module = nn.SiLU()
    assert not has_hooks(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert has_hooks(module)
        handle.remove()
    handle = module.register_full_backward_hook(lambda *_: None)
    assert has_hooks(module)
    handle.remove()
    assert not has_hooks(module)
