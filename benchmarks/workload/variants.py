"""The options of a cell beyond the plain normalisation: a table, with the minimum bytes of each entry."""

from dataclasses import dataclass

import torch
from fusednorm import ActivationName, traffic


@dataclass(frozen=True, slots=True)
class VariantOptions:
    """One line of the table.

    Attributes:
        activation: after the affine step; one of `fusednorm.arguments.checks.ACTIVATIONS`.
        residual: x + residual is normalised; forward also returns the sum.
        residual_dtype: the residual's dtype; x's when None.
        dropout: probability of a zero, after everything else.
        out_dtype: y's dtype, x's when None; a float8 y has a scale for each row.
        per_head: every head of x [tokens, heads, cols] has parameters of its own, [heads, cols].
        norms: number of consecutive norms of a chain; parameters are [norms, cols].
        affine: whether weight and bias are given.
        has_modulation: scale and shift of each sample are given, an affine step after the common one.
        has_gate: a gate of each sample is given, x's factor where it is added to the residual; backward then
            includes the gradient of the sum.
    """

    activation: ActivationName = "none"
    residual: bool = False
    residual_dtype: torch.dtype | None = None
    dropout: float = 0.0
    out_dtype: torch.dtype | None = None
    per_head: bool = False
    norms: int = 1
    affine: bool = True
    has_modulation: bool = False
    has_gate: bool = False

    def compute_min_bytes(self, pass_: str, numel: int, dtype: torch.dtype) -> int:
        """The minimum bytes that a pass over an x of `numel` elements must move."""
        size, y = dtype.itemsize, (self.out_dtype or dtype).itemsize
        residual = (self.residual_dtype or dtype).itemsize if self.residual else 0
        if pass_ == "forward":
            return traffic.compute_forward_bytes(numel, size, y, residual=residual, residual_out=residual)
        return traffic.compute_backward_bytes(
            numel,
            size,
            y,
            residual=residual,
            dresidual_out=residual if self.has_gate else 0,
            dresidual=residual if self.has_own_dresidual(dtype) else 0,
        )

    @property
    def sample_roles(self) -> tuple[str, ...]:
        """Names of the given parameters of samples."""
        return (("scale", "shift") if self.has_modulation else ()) + (("gate",) if self.has_gate else ())

    def has_own_dresidual(self, dtype: torch.dtype) -> bool:
        """Whether the residual's gradient is a separate result from that of an x of `dtype`."""
        return self.residual and (self.has_gate or self.residual_dtype not in (None, dtype))


VARIANTS = {
    "plain": VariantOptions(),
    "residual": VariantOptions(residual=True),
    "relu": VariantOptions(activation="relu"),
    "silu": VariantOptions(activation="silu"),
    "gelu_tanh": VariantOptions(activation="gelu_tanh"),
    "dropout": VariantOptions(dropout=0.1),
    "residual_dropout": VariantOptions(residual=True, dropout=0.1),
    "residual_float32": VariantOptions(residual=True, residual_dtype=torch.float32),
    "float8": VariantOptions(out_dtype=torch.float8_e4m3fn),
    "per_head": VariantOptions(per_head=True),
    "chain": VariantOptions(norms=3),
    "no_affine": VariantOptions(affine=False),
    "leaky_relu": VariantOptions(activation="leaky_relu"),
    "scale_shift_silu": VariantOptions(activation="silu", has_modulation=True),
    "adaptive": VariantOptions(affine=False, has_modulation=True),
    "gated": VariantOptions(affine=False, has_modulation=True, residual=True, has_gate=True),
}
"""Variants by their name in cells and in the CSV."""
