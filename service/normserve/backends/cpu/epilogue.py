"""The library's activations, and dropout, in float32; an element's bits do not depend on its position."""

import torch
from fusednorm.cpu.epilogue import activate_, backpropagate_
from torch import Tensor

from normserve.backends.cpu.dropout import Dropout
from normserve.backends.cpu.pieces import parts


def finish_(z: Tensor, activation: str, dropout: Dropout | None = None, kept: Tensor | None = None) -> Tensor:
    """dropout(act(z)), in z's memory.

    Args:
        z: contiguous.
        kept: dropout's mask of z, bool.
    """
    if activation == "none" and dropout is None:
        return z
    activate_(z, activation)
    if dropout is not None and kept is not None:
        flat = z.view(-1)
        for part in parts(z.numel()):
            flat[part].mul_(dropout.factors(kept.view(-1)[part]))
    return z


def through_epilogue(
    dy: Tensor,
    z: Tensor,
    activation: str,
    dropout: Dropout | None = None,
    kept: Tensor | None = None,
    *,
    overwrites_z: bool,
) -> Tensor:
    """dz = dy · keep / (1 - p) · act'(z) in float32; dy itself if it is that already.

    Args:
        dy, z: contiguous; z in float32.
        kept: dropout's mask of z, bool.
        overwrites_z: whether dz may be written to z's memory.
    """
    if activation == "none" and dropout is None:
        return dy.float()
    dz = z if overwrites_z else z.clone()
    flat_dy, flat_dz = dy.view(-1), dz.view(-1)
    for part in parts(z.numel()):
        gradient = flat_dy[part].float()
        if dropout is not None and kept is not None:
            gradient = gradient * dropout.factors(kept.view(-1)[part])
        if activation == "none":
            flat_dz[part] = gradient
        else:
            backpropagate_(gradient, flat_dz[part], activation)
    return dz


def widened(tensor: Tensor | None) -> Tensor | None:
    """A parameter in float32."""
    return None if tensor is None else tensor.float()


def summed(x: Tensor, residual: Tensor | None) -> Tensor:
    """h = x + residual in float32; x itself if it is that already."""
    if residual is None:
        return x.float()
    # Widened by the sum itself, without a copy of its own.
    return x + residual if x.dtype == torch.float32 else x.float().add_(residual)
