"""Models of volumes defined here: a 3-D U-Net as nnU-Net configures it for patches of 128 x 128 x 128."""

from itertools import pairwise

import torch
from torch import Tensor, nn

CHANNELS = (32, 64, 128, 256, 320, 320)
"""Channels by level, each with half the resolution of the one before."""

CLASSES = 4


class VolumeUNet(nn.Module):
    """Logits of each voxel's class for x [N, C, D, H, W].

    Args:
        in_channels: C.
        channels: by level; D, H and W are multiples of 2^(levels - 1).
    """

    def __init__(self, in_channels: int, channels: tuple[int, ...] = CHANNELS, classes: int = CLASSES) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([_make_level(in_channels, channels[0])])
        for width, deeper in pairwise(channels):
            self.encoder.append(_make_level(width, deeper, stride=2))
        self.upsampling, self.decoder = nn.ModuleList(), nn.ModuleList()
        for deeper, width in pairwise(reversed(channels)):
            self.upsampling.append(nn.ConvTranspose3d(deeper, width, 2, stride=2))
            self.decoder.append(_make_level(2 * width, width))
        self.classifier = nn.Conv3d(channels[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, classes, D, H, W]."""
        skipped = []
        for level in self.encoder:
            x = level(x)
            skipped.append(x)
        skipped.pop()
        for upsample, level in zip(self.upsampling, self.decoder, strict=True):
            x = level(torch.cat((upsample(x), skipped.pop()), dim=1))
        logits: Tensor = self.classifier(x)
        return logits


def _make_level(channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(_make_block(channels, out_channels, stride), _make_block(out_channels, out_channels, 1))


def _make_block(channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels, out_channels, 3, stride=stride, padding=1),
        nn.InstanceNorm3d(out_channels, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
    )
