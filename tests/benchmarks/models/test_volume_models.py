import torch
from torch import nn

from benchmarks.models.volume_models import CHANNELS, VolumeUNet


def test_logits_have_the_resolution_of_the_volume():
    assert VolumeUNet(3, (4, 6, 8), classes=5)(torch.randn(2, 3, 4, 8, 12)).shape == (2, 5, 4, 8, 12)


def test_each_level_has_half_the_resolution_of_the_one_before():
    model, seen = VolumeUNet(1, (4, 6, 8)), []
    for module in model.modules():
        if isinstance(module, nn.InstanceNorm3d):
            module.register_forward_hook(lambda norm, inputs, y: seen.append((norm.num_features, y.shape[-1])))
    model(torch.randn(1, 1, 8, 8, 8))
    down, up = [(4, 8), (4, 8), (6, 4), (6, 4), (8, 2), (8, 2)], [(6, 4), (6, 4), (4, 8), (4, 8)]
    assert seen == down + up


def test_every_level_reaches_the_logits():
    torch.manual_seed(0)
    model = VolumeUNet(1, (4, 6, 8))
    model(torch.randn(1, 1, 8, 8, 8)).square().mean().backward()
    weights = [(name, weight.grad) for name, weight in model.named_parameters() if weight.ndim == 5]
    assert not [name for name, gradient in weights if not gradient.abs().max() > 1e-6]


def test_a_norm_and_a_leaky_relu_follow_each_convolution_of_a_level():
    with torch.device("meta"):
        model = VolumeUNet(1)
    blocks = [module for module in model.modules() if isinstance(getattr(module, "0", None), nn.Conv3d)]
    assert len(blocks) == 2 * (6 + 5)
    for block in blocks:
        assert [type(layer) for layer in block] == [nn.Conv3d, nn.InstanceNorm3d, nn.LeakyReLU]
        assert block[1].affine
        assert block[2].negative_slope == 0.01
    assert [level[1][0].out_channels for level in model.encoder] == list(CHANNELS)
