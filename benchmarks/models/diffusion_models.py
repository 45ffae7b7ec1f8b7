"""Diffusion models defined here: blocks of DiT, whose LayerNorms take scale and shift from each sample.

fusednorm's calls for such a norm, and for the gated residual addition before it, replace code around the module of
the norm.  Therefore no replacement of modules makes a model use them: its own code has to.
"""

import fusednorm
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

EPS = 1e-6

HEADS = 16
"""Attention heads of DiT-XL."""

BLOCKS = 28
"""Blocks of DiT-XL."""


class TokenAttention(nn.Module):
    """Attention among all tokens of x [N, tokens, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class DiffusionBlock(nn.Module):
    """A block of DiT: attention and an MLP of x [N, tokens, width], modulated by a condition [N, width].

    Its modulation starts as any linear layer does, not with zeros, so that all gradients depend on the norms.

    Attributes:
        uses_fused_calls: whether fusednorm computes norm, modulation and gated addition; otherwise torch does, with
            an operator for each.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS, elementwise_affine=False)
        self.attention = TokenAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=EPS, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.uses_fused_calls = False

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Of x's shape."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        if self.uses_fused_calls:
            y = fusednorm.layer_norm(x, eps=EPS, scale=scale1, shift=shift1)
            attended = self.attention(y)
            y, x = fusednorm.add_layer_norm(attended, x, eps=EPS, scale=scale2, shift=shift2, gate=gate1)
        else:
            x = x + gate1.unsqueeze(1) * self.attention(_modulate(self.norm1(x), scale1, shift1))
            y = _modulate(self.norm2(x), scale2, shift2)
        result: Tensor = x + gate2.unsqueeze(1) * self.mlp(y)
        return result


def _modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiffusionTransformer(nn.Module):
    """Blocks of DiT one after the other, with the same condition.

    Args:
        blocks: default: as many as DiT-XL has.
        heads: of attention; divides the width; default: as many as DiT-XL has.
    """

    def __init__(self, width: int, blocks: int = BLOCKS, heads: int = HEADS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(blocks))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Of x's shape [N, tokens, width]; the condition is [N, width]."""
        for block in self.blocks:
            x = block(x, condition)
        return x
