"""Image models defined here: residual blocks of GroupNorm, SiLU and convolution, and a VAE decoder."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

GROUPS = 32

DECODER_CHANNELS = (512, 512, 256, 128)
"""Channels of Stable Diffusion's decoder by level, each with twice the resolution of the one before."""

LATENT_CHANNELS = 4


class ResidualBlock(nn.Module):
    """x [N, C, H, W] and two convolutions of it, each after GroupNorm and SiLU."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = _make_normalised_convolution(channels, out_channels)
        self.second = _make_normalised_convolution(out_channels, out_channels)
        self.shortcut = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, out_channels, H, W]."""
        y: Tensor = self.shortcut(x) + self.second(self.first(x))
        return y


def _make_normalised_convolution(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.GroupNorm(GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1))


class SpatialAttention(nn.Module):
    """Attention with one head among all positions of x [N, C, H, W], after GroupNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape, channels-last."""
        n, c, h, w = x.shape
        rows = self.norm(x).permute(0, 2, 3, 1).reshape(n, 1, h * w, c)
        y: Tensor = self.out(F.scaled_dot_product_attention(*self.qkv(rows).chunk(3, dim=-1)))
        return x + y.view(n, h, w, c).permute(0, 3, 1, 2)


class UpsamplingBlock(nn.Module):
    """x [N, C, H, W] at twice the resolution, and a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, 2 H, 2 W]."""
        y: Tensor = self.convolution(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return y


def make_residual_blocks(channels: int, count: int = 8) -> nn.Sequential:
    """`count` blocks with equal numbers of channels."""
    return nn.Sequential(*(ResidualBlock(channels, channels) for _ in range(count)))


def make_vae_decoder(channels: tuple[int, ...] = DECODER_CHANNELS, blocks: int = 3) -> nn.Sequential:
    """A latent [N, 4, H, W] to an image [N, 3, 8 H, 8 W]: two blocks around attention, then levels of blocks."""
    widest = channels[0]
    layers: list[nn.Module] = [
        nn.Conv2d(LATENT_CHANNELS, widest, 3, padding=1),
        ResidualBlock(widest, widest),
        SpatialAttention(widest),
        ResidualBlock(widest, widest),
    ]
    before = widest
    for level, width in enumerate(channels):
        for _ in range(blocks):
            layers.append(ResidualBlock(before, width))
            before = width
        if level < len(channels) - 1:
            layers.append(UpsamplingBlock(width))
    return nn.Sequential(*layers, _make_normalised_convolution(before, 3))
