"""The cells: one is one pass of one operation over one shape, dtype and layout."""

from dataclasses import dataclass
from typing import Any

from benchmarks.workload.variants import VARIANTS, VariantOptions

X_BYTES = 256 << 20
"""Bytes of x in a sweep over row lengths; cells with a given number of rows do not belong to such a sweep."""

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KernelCell:
    """One row of the benchmark for each provider.

    Attributes:
        op: layer_norm, rms_norm or group_norm.
        pass_: forward or backward (backward with statistics saved, and the gradients of the parameters); of modules
            forward_backward.
        variant: a name in `VARIANTS`.
        shape: (rows, cols), (tokens, heads, cols), (n, tokens, cols) of samples, or (n, c, *spatial) whatever the
            memory format.
        groups: num_groups of group_norm, 0 elsewhere.
        dtype: of x, y and the parameters.
        layout: rows, heads, samples, nchw or nhwc; layer_norm and rms_norm of the last two are over the channels.
    """

    op: str
    pass_: str
    variant: str
    shape: tuple[int, ...]
    groups: int
    dtype: str
    layout: str

    @property
    def variant_options(self) -> VariantOptions:
        """The variant with this name."""
        return VARIANTS[self.variant]

    @property
    def is_over_channels(self) -> bool:
        """Whether this is a LayerNorm or RMSNorm over dim 1."""
        return not self.groups and self.layout in ("nchw", "nhwc")

    @property
    def norm_options(self) -> dict[str, Any]:
        """Arguments of the library's functions: the activation, and the layout of a norm over channels."""
        layout = {"layout": "nchw"} if self.is_over_channels else {}
        return {"activation": self.variant_options.activation, **layout}

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of weight and of bias."""
        if self.groups or self.is_over_channels:
            return self.shape[1:2]
        if self.variant_options.per_head:
            return self.shape[-2:]
        return self.shape[-1:] if self.variant_options.norms == 1 else (self.variant_options.norms, self.shape[-1])

    @property
    def shape_name(self) -> str:
        """4096x8192, 32768x32x128, 16x1024x1152, or 8x512x64x64g32."""
        return "x".join(map(str, self.shape)) + (f"g{self.groups}" if self.groups else "")

    @property
    def name(self) -> str:
        """layer_norm forward plain 4096x8192 bfloat16 rows."""
        return f"{self.op} {self.pass_} {self.variant} {self.shape_name} {self.dtype} {self.layout}"


def compute_sweep_rows(cols: int, dtype: str) -> int:
    """Rows of an x of `X_BYTES`; or its tokens, if a token has `cols` elements in total."""
    return max(1, X_BYTES // ITEMSIZE[dtype] // cols)
