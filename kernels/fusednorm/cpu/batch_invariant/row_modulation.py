"""Scale, shift and gate of each sample of rows [samples, tokens, N], and their gradients.

z is the norm of h = residual + gate * x, and followed by z * (1 + scale) + shift.  Rows are computed in chunks of
`split_rows`: complete samples, or some tokens of one sample.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from fusednorm.arguments.checks import count_samples
from fusednorm.cpu.batch_invariant.channel_rows import ChannelRows
from fusednorm.cpu.supported_arguments import add_residual
from fusednorm.results import Backward


def compute_sample_shape(x: Tensor, modulations: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Compute the shape [samples, tokens, cols] of the rows of x [..., cols], which is not empty.

    Raises:
        KernelInputError: the modulations have shapes that do not fit x, or differ.
    """
    samples, cols = count_samples(tuple(x.shape), modulations), x.shape[-1]
    return samples, x.numel() // (samples * cols), cols


class RowModulation:
    """The scale, shift and gate of each sample, each of which may be absent.

    Attributes:
        scale, shift, gate: [samples, cols], of any type, or None.
        is_affine: whether there is a scale or a shift.
        tokens: the rows of each sample, with a layout its positions; 0 if rows belong to no sample.
    """

    def __init__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        gate: Tensor | None = None,
        layout: str | None = None,
    ) -> None:
        """Args:
        x: [samples, tokens, cols] if scale, shift or gate is given.
        layout: "nchw" for x [samples, cols, *spatial].
        """
        self.scale, self.shift, self.gate = scale, shift, gate
        self.is_affine = not (scale is shift is None)
        if layout is not None:
            self.tokens = prod(x.shape[2:])
        else:
            self.tokens = x.shape[1] if self.is_affine or gate is not None else 0

    def add_residual(self, piece: slice, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute residual + gate * x in float32 for some rows [rows, cols] of both.

        Without a residual, return x in float32.
        """
        if self.gate is None or residual is None:
            return add_residual(x, residual)
        return self.multiply_by_gate_(piece, x.to(torch.float32, copy=True)).add_(residual)

    def multiply_by_gate_(self, piece: slice, rows: Tensor) -> Tensor:
        """Multiply some rows [rows, cols] by their samples' gate in the rows' memory, and return the rows."""
        if self.gate is not None:
            self.view_by_sample(rows, piece).mul_(self._slice_samples(self.gate, piece))
        return rows

    def apply_(self, z: Tensor, piece: slice) -> Tensor:
        """Compute z * (1 + scale) + shift for some rows [rows, cols] in z's memory, and return z."""
        if self.scale is not None:
            self.view_by_sample(z, piece).mul_(self._compute_factors(self.scale, piece))
        if self.shift is not None:
            self.view_by_sample(z, piece).add_(self._slice_samples(self.shift, piece))
        return z

    def view_by_sample(self, rows: Tensor, piece: slice) -> Tensor:
        """View some rows [rows, cols] as [samples, tokens, cols]; the memory is shared."""
        samples = self.find_samples(piece)
        return rows.view(samples.stop - samples.start, -1, rows.shape[-1])

    def find_samples(self, piece: slice) -> slice:
        """Return the range of the samples to which some rows belong."""
        return slice(piece.start // self.tokens, -(-piece.stop // self.tokens))

    def scale_gradient(self, dz: Tensor, piece: slice) -> Tensor:
        """Compute the gradient of z from dz, that of z * (1 + scale) + shift; without a scale it is dz itself."""
        if self.scale is None:
            return dz
        return (self.view_by_sample(dz, piece) * self._compute_factors(self.scale, piece)).view(dz.shape)

    def _compute_factors(self, scale: Tensor, piece: slice) -> Tensor:
        """Compute the factors 1 + scale of some rows, float32 [samples, 1, cols]."""
        return self._slice_samples(scale, piece).to(torch.float32, copy=True).add_(1.0)

    def _slice_samples(self, given: Tensor, piece: slice) -> Tensor:
        return given[self.find_samples(piece)].unsqueeze(1)


class ModulationGradients:
    """The gradients of scale, shift and gate: dscale = sum(dz * z), dshift = sum(dz) and dgate = sum(dh * x).

    z is the norm before scale and shift, dz the gradient after them, and dh that of residual + gate * x.  Sums are
    over each sample's tokens; rows are added chunk by chunk, in order.
    """

    def __init__(self, modulation: RowModulation) -> None:
        self.modulation = modulation
        self._dscale, self._dshift, self._dgate = (
            None if given is None else _SampleSums(modulation, given)
            for given in (modulation.scale, modulation.shift, modulation.gate)
        )

    def add_affine_chunk(self, piece: slice, dz: Tensor, z: Tensor) -> Tensor:
        """Add the terms of scale and shift for some rows, dz and z [rows, cols]; return the gradient of z."""
        if self._dscale is not None:
            self._dscale.add_terms(piece, dz * z)
        if self._dshift is not None:
            self._dshift.add_terms(piece, dz.clone())
        return self.modulation.scale_gradient(dz, piece)

    def add_gate_chunk_(self, piece: slice, dh: Tensor, x: Tensor | ChannelRows) -> Tensor:
        """Add the terms of the gate for some rows, dh [rows, cols]; return dx = gate * dh in dh's memory.

        Args: x: all rows.
        """
        if self._dgate is not None:
            self._dgate.add_terms(piece, dh * x[piece])
        return self.modulation.multiply_by_gate_(piece, dh)

    def add_to(self, gradients: Backward) -> Backward:
        """Return the gradients with dscale, dshift and dgate, in the types and shapes of scale, shift and gate."""
        dscale, dshift, dgate = (
            None if sums is None else sums.result for sums in (self._dscale, self._dshift, self._dgate)
        )
        return gradients._replace(dscale=dscale, dshift=dshift, dgate=dgate)


class _SampleSums:
    """The sum over each sample's tokens of terms that are added chunk by chunk.

    Attributes:
        result: the sums [samples, cols], complete when all rows have been added.
    """

    def __init__(self, modulation: RowModulation, like: Tensor) -> None:
        self._modulation = modulation
        self.result = torch.empty_like(like)
        self._total: Tensor | None = None

    def add_terms(self, piece: slice, terms: Tensor) -> None:
        """Add the terms of some rows, float32 [rows, cols]; their memory is overwritten."""
        tokens = self._modulation.tokens
        sums = sum_tokens_(self._modulation.view_by_sample(terms, piece))
        if piece.start % tokens and self._total is not None:
            sums = self._total.add_(sums)
        elif piece.stop % tokens:
            self._total = sums = sums.clone()
        self.result[self._modulation.find_samples(piece)] = sums


def sum_tokens_(terms: Tensor) -> Tensor:
    """Sum [samples, tokens, cols] over the tokens, in the memory of the terms; the result is [samples, cols].

    The last half of the tokens is added to the first until one is left.  So the order of a sum depends only on the
    number of tokens, while that of torch's own sum depends on the number of samples and threads, too.
    """
    while (tokens := terms.shape[1]) > 1:
        half = tokens // 2
        terms[:, :half].add_(terms[:, tokens - half :])
        terms = terms[:, : tokens - half]
    return terms[:, 0]
