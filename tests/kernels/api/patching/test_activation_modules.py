"""Which modules are activations that the kernels fuse."""

import pytest
from fusednorm.api.patching.activation_modules import (
    NO_ACTIVATION,
    ActivationOptions,
    find_activation,
    find_inner_activation,
    has_hooks,
)
from torch import nn

from tests.kernels.api.patching.norms import LayerNormAct, add_hook, remove_hook


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (nn.SiLU(), ActivationOptions("silu")),
        (nn.ReLU(inplace=True), ActivationOptions("relu")),
        (nn.LeakyReLU(), ActivationOptions("leaky_relu", 0.01)),
        (nn.LeakyReLU(0.2, inplace=True), ActivationOptions("leaky_relu", 0.2)),
        (nn.GELU(), ActivationOptions("gelu")),
        (nn.GELU("tanh"), ActivationOptions("gelu_tanh")),
        (nn.Mish(), None),
        (nn.RReLU(), None),
        (type("Other", (nn.SiLU,), {})(), None),
    ],
)
def test_activations_are_known_by_their_classes(module, activation):
    assert find_activation(module) == activation


def test_an_activation_behind_a_hook_is_another_module():
    module = nn.SiLU()
    add_hook(module)
    assert find_activation(module) is None
    remove_hook(module)
    assert find_activation(module) == ActivationOptions("silu")


@pytest.mark.parametrize(
    ("children", "activation"),
    [
        ((nn.Identity(), nn.Identity()), NO_ACTIVATION),
        ((nn.ReLU(), nn.Identity()), ActivationOptions("relu")),
        ((nn.ReLU(), nn.SiLU()), None),
    ],
)
def test_a_norm_has_at_most_one_activation(children, activation):
    norm = LayerNormAct(8)
    norm.drop, norm.act = children
    assert find_inner_activation(norm) == activation
    assert find_inner_activation(nn.LayerNorm(8)) == NO_ACTIVATION


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
