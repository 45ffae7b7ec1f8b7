"""GroupNorm of [B, C, *spatial] on the CPU, contiguous or channels-last."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusednorm.cpu.batch_invariant.channel_rows import view_planes
from fusednorm.cpu.chunks import split_groups, split_range
from fusednorm.cpu.dropout_mask import DropoutMask, make_dropout_mask
from fusednorm.cpu.epilogue import apply_epilogue_, backpropagate_epilogue
from fusednorm.cpu.supported_arguments import add_residual, to_float32
from fusednorm.results import Backward, Forward
from fusednorm.tensors.layouts import is_channels_last


def group_norm_forward(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
) -> Forward:
    """Compute GroupNorm's forward pass with the arguments and results of `fusednorm.reference`."""
    cut = _ChunkedSamples(x, num_groups, make_dropout_mask(dropout, seed))
    y, residual_out = cut.make_result(out_dtype or x.dtype), cut.make_result(x.dtype)
    of_groups = (x.shape[0], num_groups)
    mean, rstd = (
        x.new_empty(of_groups, dtype=torch.float32) if stats and not cut.is_single_chunk else None for _ in range(2)
    )
    weight, bias = to_float32(weight), to_float32(bias)
    for piece in cut.iterate_chunks():
        h = piece.add_residual(residual)
        if residual is not None:
            residual_out.write_chunk(piece, h)
        z, centre, inverse = piece.normalise(h, weight, bias, eps)
        del h
        z = _modulate_(z, piece.compute_scale_factor(scale), piece.slice_modulation(shift))
        y.write_chunk(
            piece, apply_epilogue_(z, activation, negative_slope, cut.dropout, piece.compute_dropout_mask())
        )
        del z
        if cut.is_single_chunk and stats:
            mean, rstd = centre, inverse
        elif mean is not None and rstd is not None:
            mean[piece.samples, piece.groups], rstd[piece.samples, piece.groups] = centre, inverse
    return Forward(y.get_tensor(), mean, rstd, None if residual is None else residual_out.get_tensor())


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Backward:
    """Compute GroupNorm's backward pass with the arguments and results of `fusednorm.reference`.

    The parameters' gradients of many samples are summed chunk by chunk, in order.
    """
    cut = _ChunkedSamples(x, num_groups, make_dropout_mask(dropout, seed))
    w, b = to_float32(weight), to_float32(bias)
    # torch's kernel has no gradient of the bias without a weight.
    of_kernel = torch.ones_like(b) if w is None and b is not None else w
    needed = [True, weight is not None, bias is not None]
    dweight, dbias = (None, None) if cut.is_single_chunk else (_make_zeros_like(w), _make_zeros_like(b))
    dscale, dshift = (None if of is None else torch.empty_like(of) for of in (scale, shift))
    result = cut.make_result(x.dtype)
    for piece in cut.iterate_chunks():
        h = piece.add_residual(residual)
        z, centre, inverse = piece.normalise(h, w, b, eps)
        if mean is not None and rstd is not None:
            centre, inverse = piece.slice_groups(mean), piece.slice_groups(rstd)
        factor = piece.compute_scale_factor(scale)
        # z itself is needed again only if it is modulated.
        is_modulated = scale is not None or shift is not None
        modulated = _modulate_(z.clone() if is_modulated else z, factor, piece.slice_modulation(shift))
        dz = backpropagate_epilogue(
            piece.slice_planes(dy),
            modulated,
            activation,
            negative_slope,
            cut.dropout,
            piece.compute_dropout_mask(),
            overwrites_z=True,
        )
        del modulated
        if is_modulated:
            piece.write_modulation_gradients(dz, z, dscale, dshift)
        del z
        if factor is not None:
            dz = dz * factor
        # torch's kernel subtracts sums of dz·h from one another, which cancels when the mean is large; h without
        # its mean has the same gradient and nothing to cancel.
        dx, dw, db = torch.ops.aten.native_group_norm_backward(
            dz,
            piece.subtract_mean(h, centre, overwrites=residual is not None or x.dtype != torch.float32),
            torch.zeros_like(centre),
            inverse,
            piece.slice_channels(of_kernel),
            *piece.shape,
            piece.group_count,
            needed,
        )
        del h, dz
        if dresidual_out is not None:
            dx += piece.slice_planes(dresidual_out)
        result.write_chunk(piece, dx)
        if cut.is_single_chunk:
            dweight, dbias = dw, db
            continue
        if dweight is not None:
            dweight[piece.channels] += dw
        if dbias is not None:
            dbias[piece.channels] += db
    dx = result.get_tensor()
    return Backward(
        dx=dx,
        dweight=None if weight is None or dweight is None else dweight.to(weight.dtype),
        dbias=None if bias is None or dbias is None else dbias.to(bias.dtype),
        dresidual=None if residual is None else dx,
        dscale=dscale,
        dshift=dshift,
    )


class _ChunkedSamples:
    """A tensor x, divided into chunks of complete groups; the chunks are computed one after another.

    Attributes:
        x: [B, C, *spatial].
        channel_planes: the view [B, C, positions] of x.
        is_single_chunk: whether there is one chunk only.
    """

    def __init__(self, x: Tensor, num_groups: int, dropout: DropoutMask | None) -> None:
        self.x = x
        self.num_groups = num_groups
        self.dropout = dropout
        self.channel_planes = view_planes(x)
        self.channels_last = is_channels_last(x)
        samples, channels, positions = self.channel_planes.shape
        elements = channels // num_groups * positions
        self._pieces = list(split_groups(samples, num_groups, elements))
        self.is_single_chunk = len(self._pieces) == 1
        self._cached_mask: tuple[slice, Tensor] | None = None

    def iterate_chunks(self) -> Iterator["_GroupChunk"]:
        """Yield the chunks of x, in order."""
        of_group = self.channel_planes.shape[1] // self.num_groups
        for samples, groups in self._pieces:
            yield _GroupChunk(self, samples, groups, slice(groups.start * of_group, groups.stop * of_group))

    def make_result(self, dtype: torch.dtype) -> "_ChunkedResult":
        """Make a result with x's shape and layout, to be written chunk by chunk."""
        return _ChunkedResult(self, dtype)

    def compute_dropout_mask(self, samples: slice, channels: slice) -> Tensor:
        """Compute the dropout mask of some samples and channels, bool [samples, channels, positions].

        For a channels-last x the mask of complete samples is computed, and cached for their other channels.
        """
        assert self.dropout is not None
        _, size, positions = self.channel_planes.shape
        rows = range(samples.start, samples.stop)
        if not self.channels_last:
            return self.dropout.compute(rows, range(channels.start * positions, channels.stop * positions))
        # Adjacent elements belong to different channels, so the mask is computed for complete samples.
        if self._cached_mask is None or self._cached_mask[0] != samples:
            self._cached_mask = samples, self.dropout.compute(rows, range(size * positions))
        return self._cached_mask[1].view(-1, positions, size)[:, :, channels].transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class _GroupChunk:
    """A chunk of x that is computed at once: some groups of one sample, or some complete samples.

    Attributes:
        source: the x that the chunk is part of.
        samples, groups, channels: the ranges that the chunk has.
    """

    source: _ChunkedSamples
    samples: slice
    groups: slice
    channels: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of samples, channels and positions."""
        samples, channels = self.samples, self.channels
        return samples.stop - samples.start, channels.stop - channels.start, self.source.channel_planes.shape[2]

    @property
    def group_count(self) -> int:
        """The number of the chunk's groups in one sample."""
        return len(range(self.groups.start, self.groups.stop))

    def slice_tensor(self, t: Tensor) -> Tensor:
        """Return the chunk's part of a tensor [B, C, ...]."""
        # Small requests are a single piece, and each index costs as much as some of their arithmetic.
        return t if self.source.is_single_chunk else t[self.samples, self.channels]

    def add_residual(self, residual: Tensor | None) -> Tensor:
        """Compute x + residual for the chunk, float32 [samples, channels, positions].

        The result shares x's memory if there is no residual, and x already has that dtype and order.
        """
        x = self.slice_tensor(self.source.channel_planes)
        if not x.is_contiguous():
            # Widened and put in order in one pass.
            x = torch.empty(x.shape, dtype=torch.float32, device="cpu").copy_(x)
        of_residual = None if residual is None else self.slice_tensor(view_planes(residual))
        return add_residual(x, of_residual).contiguous()

    def slice_planes(self, t: Tensor) -> Tensor:
        """Return the chunk's part of a tensor like x, contiguous [samples, channels, positions].

        A channels-last part is copied, since torch's channels-last kernel takes the variance as E[h²] - mean²,
        which is noise when the mean is large.
        """
        return self.slice_tensor(view_planes(t)).contiguous()

    def normalise(
        self, h: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute GroupNorm of h, the chunk's x + residual; return the result, and each group's mean and rstd."""
        weight, bias = self.slice_channels(weight), self.slice_channels(bias)
        samples, channels, positions = h.shape
        return torch.native_group_norm(h, weight, bias, samples, channels, positions, self.group_count, eps)

    def slice_channels(self, parameter: Tensor | None) -> Tensor | None:
        return parameter if parameter is None or self.source.is_single_chunk else parameter[self.channels]

    def slice_groups(self, statistic: Tensor) -> Tensor:
        return statistic[self.samples, self.groups].contiguous()

    def slice_modulation(self, given: Tensor | None) -> Tensor | None:
        """Return the chunk's part of scale or shift in float32, with an axis that broadcasts over positions."""
        return None if given is None else self.slice_tensor(given).float().unsqueeze(-1)

    def compute_scale_factor(self, scale: Tensor | None) -> Tensor | None:
        """Compute 1 + scale, or None without a scale."""
        scale = self.slice_modulation(scale)
        return None if scale is None else 1 + scale

    def compute_dropout_mask(self) -> Tensor | None:
        """Return the dropout mask of the chunk's elements; None without dropout."""
        return (
            None if self.source.dropout is None else self.source.compute_dropout_mask(self.samples, self.channels)
        )

    def subtract_mean(self, h: Tensor, mean: Tensor, *, overwrites: bool) -> Tensor:
        """Subtract each group's mean from h, in h's memory with `overwrites`, else in new memory."""
        grouped = h.view(*mean.shape, -1)
        centre = mean[..., None]
        return (grouped.sub_(centre) if overwrites else grouped - centre).view(h.shape)

    def write_modulation_gradients(
        self, dz: Tensor, z: Tensor, dscale: Tensor | None, dshift: Tensor | None
    ) -> None:
        """Write the chunk's part of the gradients of scale and shift, dscale and dshift [B, C].

        They are the sums of dz * z and of dz over positions; either gradient may be None.
        """
        samples, channels, positions = z.shape
        at_once = split_range(channels, samples * positions)
        # Summed together, since torch sums a lone row in another order than one of several.
        sums = [torch.stack((dz[:, some] * z[:, some], dz[:, some])).sum(-1) for some in at_once]
        for gradient, of_piece in zip((dscale, dshift), torch.cat(sums, dim=-1), strict=True):
            if gradient is not None:
                gradient[self.samples, self.channels] = of_piece


class _ChunkedResult:
    """A result with x's shape that is written chunk by chunk; allocated when the first chunk is written."""

    def __init__(self, cut: _ChunkedSamples, dtype: torch.dtype) -> None:
        self._cut = cut
        self._dtype = dtype
        self._tensor: Tensor | None = None

    def write_chunk(self, piece: _GroupChunk, values: Tensor) -> None:
        """Write the values of a chunk, [samples, channels, positions], after a cast to the result's dtype."""
        x = self._cut.x
        if self._cut.is_single_chunk and not self._cut.channels_last:
            self._tensor = values.view(x.shape).to(self._dtype)
            return
        if self._tensor is None:
            self._tensor = torch.empty_like(x, dtype=self._dtype)
        piece.slice_tensor(view_planes(self._tensor)).copy_(values)

    def get_tensor(self) -> Tensor:
        """Return the tensor, after every chunk has been written."""
        assert self._tensor is not None
        return self._tensor


def _modulate_(z: Tensor, factor: Tensor | None, shift: Tensor | None) -> Tensor:
    """Compute z * factor + shift in z's memory; a factor or shift of None is left out.

    z is [B, C, positions].  The factor is 1 + scale.
    """
    if factor is not None:
        z *= factor
    if shift is not None:
        z += shift
    return z


def _make_zeros_like(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else torch.zeros_like(parameter)
