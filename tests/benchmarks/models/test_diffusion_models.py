import fusednorm
import pytest
import torch
from torch import nn

from benchmarks.models.diffusion_models import DiffusionBlock, DiffusionTransformer
from benchmarks.models.norm_providers import keep_norms, patch_norms


@pytest.fixture
def transformer():
    torch.manual_seed(0)
    return DiffusionTransformer(32, blocks=2, heads=4).double()


def train(model):
    """The result, the gradients of both inputs, and those of the parameters by name."""
    torch.manual_seed(1)
    x, condition = (torch.randn(*shape, 32, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (3,)))
    y = model(x, condition)
    y.square().mean().backward()
    return y, x.grad, condition.grad, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_fused_calls_give_the_results_and_gradients_of_torchs_operators(transformer):
    want = train(transformer)
    transformer.zero_grad()
    patch_norms(transformer)
    torch.testing.assert_close(train(transformer), want)
    assert want[0].shape == (3, 5, 32)


def test_every_gradient_depends_on_the_norms(transformer):
    want = train(transformer)
    transformer.zero_grad()
    for block in transformer.blocks:
        block.norm1.eps = block.norm2.eps = 3.0
    _, *others, gradients = train(transformer)
    assert all(not torch.allclose(one, other) for one, other in zip(others, want[1:3], strict=True))
    assert not [name for name, gradient in gradients.items() if torch.allclose(gradient, want[3][name])]


def test_each_block_makes_two_fused_calls_for_fusednorm_and_none_for_torch(transformer, monkeypatch):
    calls = []

    def count(name):
        function = getattr(fusednorm, name)

        def call(*tensors, **options):
            calls.append((name, sorted(options)))
            return function(*tensors, **options)

        monkeypatch.setattr(fusednorm, name, call)

    count("layer_norm")
    count("add_layer_norm")
    keep_norms(transformer)
    train(transformer)
    assert not calls
    patch_norms(transformer)
    train(transformer)
    assert calls == 2 * [
        ("layer_norm", ["eps", "scale", "shift"]),
        ("add_layer_norm", ["eps", "gate", "scale", "shift"]),
    ]


def test_a_transformer_of_dit_xl_has_its_parameters():
    with torch.device("meta"):
        model = DiffusionTransformer(1152)
    blocks = [module for module in model.modules() if isinstance(module, DiffusionBlock)]
    assert len(blocks) == 28
    # Attention has 4 matrices of width x width, the MLP 8, the modulation 6.
    assert sum(parameter.numel() for parameter in blocks[0].parameters() if parameter.ndim == 2) == 18 * 1152**2
    norms = [module for module in blocks[0].modules() if isinstance(module, nn.LayerNorm)]
    assert [(norm.eps, norm.weight, norm.bias) for norm in norms] == 2 * [(1e-6, None, None)]
