"""A scale and a shift for each sample of rows [samples, tokens, N]: z * (1 + scale) + shift, and their gradients.

Rows are computed in chunks of `split_rows`: complete samples, or some tokens of one sample.
"""

import torch
from torch import Tensor


class RowModulation:
    """The scale and the shift of each sample, either of which may be absent; without both nothing is changed.

    Attributes:
        tokens: the rows of each sample; 0 without scale and shift.
    """

    def __init__(self, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> None:
        """Args:
        x: [samples, tokens, cols] if there is a scale or a shift.
        scale, shift: [samples, cols], of any type.
        """
        self._scale, self._shift = scale, shift
        self.tokens = 0 if scale is None and shift is None else x.shape[1]

    def apply_(self, z: Tensor, piece: slice) -> Tensor:
        """Compute z * (1 + scale) + shift for some rows [rows, cols] in z's memory, and return z."""
        if self._scale is not None:
            self.view_by_sample(z, piece).mul_(self._compute_factors(self._scale, piece))
        if self._shift is not None:
            self.view_by_sample(z, piece).add_(self._slice_samples(self._shift, piece))
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
        if self._scale is None:
            return dz
        return (self.view_by_sample(dz, piece) * self._compute_factors(self._scale, piece)).view(dz.shape)

    def _compute_factors(self, scale: Tensor, piece: slice) -> Tensor:
        """Compute the factors 1 + scale of some rows, float32 [samples, 1, cols]."""
        return self._slice_samples(scale, piece).to(torch.float32, copy=True).add_(1.0)

    def _slice_samples(self, given: Tensor, piece: slice) -> Tensor:
        return given[self.find_samples(piece)].unsqueeze(1)


class ModulationGradients:
    """The gradients of scale and shift, dscale = sum(dz * z) and dshift = sum(dz) over each sample's tokens.

    z is the norm before scale and shift, dz the gradient after them.  Rows are added chunk by chunk, in order.
    """

    def __init__(self, modulation: RowModulation, scale: Tensor | None, shift: Tensor | None) -> None:
        self._modulation = modulation
        self._dscale = None if scale is None else _SampleSums(modulation, scale)
        self._dshift = None if shift is None else _SampleSums(modulation, shift)

    def add_chunk(self, piece: slice, dz: Tensor, z: Tensor) -> Tensor:
        """Add the terms of some rows, dz and z [rows, cols], to the sums; return the gradient of z."""
        if self._dscale is not None:
            self._dscale.add_terms(piece, dz * z)
        if self._dshift is not None:
            self._dshift.add_terms(piece, dz.clone())
        return self._modulation.scale_gradient(dz, piece)

    def get_results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dscale and dshift, in the types and shapes of scale and shift."""
        dscale, dshift = (None if each is None else each.result for each in (self._dscale, self._dshift))
        return dscale, dshift


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
