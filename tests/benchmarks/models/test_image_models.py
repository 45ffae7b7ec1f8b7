import torch
from torch import nn

from benchmarks.models.image_models import make_residual_blocks, make_vae_decoder


def test_blocks_keep_shape_and_memory_format():
    x = torch.randn(2, 32, 4, 4).contiguous(memory_format=torch.channels_last)
    y = make_residual_blocks(32, 2).to(memory_format=torch.channels_last)(x)
    assert y.shape == x.shape
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_the_decoder_makes_images_eight_times_as_large():
    decoder = make_vae_decoder((64, 64, 32, 32), blocks=1).to(memory_format=torch.channels_last)
    x = torch.randn(1, 4, 2, 3).contiguous(memory_format=torch.channels_last)
    y = decoder(x)
    assert y.shape == (1, 3, 16, 24)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_the_decoder_has_the_norms_of_stable_diffusions():
    with torch.device("meta"):
        decoder = make_vae_decoder()
    norms = [module.num_channels for module in decoder.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 2 * (2 + 4 * 3) + 2
    assert norms.count(128) == 6
    assert {module.num_groups for module in decoder.modules() if isinstance(module, nn.GroupNorm)} == {32}


def test_every_activation_follows_its_norm_in_a_sequence():
    for sequence in make_vae_decoder((32, 32), blocks=1).modules():
        if isinstance(sequence, nn.Sequential) and isinstance(sequence[0], nn.GroupNorm):
            assert [type(layer) for layer in sequence] == [nn.GroupNorm, nn.SiLU, nn.Conv2d]
