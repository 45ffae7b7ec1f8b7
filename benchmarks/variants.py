"""What a cell asks for beyond the plain normalisation: one table, with the fewest bytes of each entry."""

from dataclasses import dataclass

from fusednorm import traffic


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the table.

    Attributes:
        activation: after the affine step; one of `fusednorm.epilogue.ACTIVATIONS`.
        residual: x + residual is what is normalised; forward returns the sum too.
        dropout: probability of a zero, after everything else.
    """

    activation: str = "none"
    residual: bool = False
    dropout: float = 0.0

    def min_bytes(self, pass_: str, numel: int, size: int) -> int:
        """The fewest bytes that a pass over `numel` elements of `size` bytes each must move."""
        residual = size if self.residual else 0
        if pass_ == "forward":
            return traffic.forward_bytes(numel, size, size, residual=residual, residual_out=residual)
        return traffic.backward_bytes(numel, size, size, residual=residual)


VARIANTS = {
    "plain": Variant(),
    "residual": Variant(residual=True),
    "relu": Variant(activation="relu"),
    "silu": Variant(activation="silu"),
    "gelu_tanh": Variant(activation="gelu_tanh"),
    "dropout": Variant(dropout=0.1),
    "residual_dropout": Variant(residual=True, dropout=0.1),
}
"""By the name that stands in a cell and in the CSV."""
