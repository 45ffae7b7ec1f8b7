"""The tensors of a cell, and a provider's run with them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from fusednorm import Backward
from torch import Tensor

from benchmarks.workload.benchmark_cells import KernelCell

EPS = 1e-5
SEED = 1

_MODULATION_CHUNKS = {"gate": 2, "shift": 3, "scale": 4}
"""Those of the six chunks of a DiT block's modulation that are used between attention and the norm after it."""

Results = tuple[Tensor, ...]


class TensorCache:
    """Random tensors by role, kept until x's shape, dtype or layout changes: neighbouring cells share them.

    They are drawn from a generator of their own: providers seed torch's, after which dy would be equal to x.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._key: object = None
        self._kept: dict[object, Tensor] = {}

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(SEED)

    def get_tensor(self, role: str, cell: KernelCell) -> Tensor:
        """A tensor by its role in the cell.

        x, dy, residual and dresidual_out have x's shape and layout, weight and bias the parameters' shape.  scale
        and shift of channels are [N, C]; of samples of tokens, they and gate are [N, cols], chunks of one tensor.
        """
        key = (cell.shape, cell.dtype, cell.layout)
        if key != self._key:
            self._key, self._kept = key, {}
        dtype = getattr(torch, cell.dtype)
        if cell.layout == "samples" and role in _MODULATION_CHUNKS:
            n, _, cols = cell.shape
            modulation = self._get_random("modulation", (n, 6 * cols), dtype, "rows")
            return modulation.chunk(6, dim=-1)[_MODULATION_CHUNKS[role]]
        if role in ("weight", "bias"):
            return self._get_random(role, cell.parameter_shape, dtype, "rows")
        if role in ("scale", "shift"):
            return self._get_random(role, cell.shape[:2], dtype, "rows")
        if role in ("residual", "dresidual_out"):
            dtype = cell.variant_options.residual_dtype or dtype
        return self._get_random(role, cell.shape, dtype, cell.layout)

    def _get_random(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
        key = (role, shape, dtype)
        if key not in self._kept:
            self._kept[key] = self._make_random(shape, dtype, layout)
        return self._kept[key]

    def _make_random(self, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
        x = torch.randn(shape, generator=self._generator, device=self._device, dtype=dtype)
        if layout != "nhwc":
            return x
        axes = [0, *range(2, x.ndim), 1]
        return x.permute(axes).contiguous().permute([0, x.ndim - 1, *range(1, x.ndim - 1)])


@dataclass(frozen=True, slots=True)
class BenchmarkProblem:
    """One cell with its tensors; absent ones are None."""

    cell: KernelCell
    tensors: TensorCache

    @property
    def x(self) -> Tensor:
        return self.tensors.get_tensor("x", self.cell)

    @property
    def dy(self) -> Tensor:
        return self.tensors.get_tensor("dy", self.cell)

    @property
    def residual(self) -> Tensor | None:
        return self.tensors.get_tensor("residual", self.cell) if self.cell.variant_options.residual else None

    @property
    def weight(self) -> Tensor | None:
        return self.tensors.get_tensor("weight", self.cell) if self.cell.variant_options.affine else None

    @property
    def bias(self) -> Tensor | None:
        has_bias = self.cell.variant_options.affine and self.cell.op != "rms_norm"
        return self.tensors.get_tensor("bias", self.cell) if has_bias else None

    @property
    def dresidual_out(self) -> Tensor | None:
        """The gradient of the sum, in a backward pass with a gate."""
        return self.tensors.get_tensor("dresidual_out", self.cell) if self.cell.variant_options.has_gate else None

    @property
    def sample_parameters(self) -> dict[str, Tensor]:
        """scale, shift and gate by name, those that the variant has."""
        return {role: self.tensors.get_tensor(role, self.cell) for role in self.cell.variant_options.sample_roles}

    def list_gradients(self, gradients: Backward) -> Results:
        """Those gradients that `ProviderRun.call` returns, in its order."""
        has_dresidual = self.cell.variant_options.has_own_dresidual(self.x.dtype)
        dx, dweight, dbias, dresidual, *of_samples = gradients
        return drop_none((dx, dweight, dbias, *of_samples, dresidual if has_dresidual else None))

    @property
    def min_bytes(self) -> int:
        """The minimum number of bytes that the pass must move."""
        return self.cell.variant_options.compute_min_bytes(self.cell.pass_, self.x.numel(), self.x.dtype)


@dataclass(frozen=True, slots=True)
class ProviderRun:
    """A provider's implementation of a problem.

    Attributes:
        call: the whole pass, with all work that it needs; returns (y[, residual_out][, scale]), or
            (dx[, dweight][, dbias][, dscale, dshift][, dgate][, dresidual]) with dresidual only if it is not dx.
        find_kept: which elements the provider's own dropout kept, bool like x, given the results of a call; None
            where there is no dropout or the mask is fusednorm's.
        restore_inputs: restores inputs before each call, outside the measured time.
    """

    call: Callable[[], Results]
    find_kept: Callable[[Results], Tensor] | None = None
    restore_inputs: Callable[[], object] | None = None


def drop_none(tensors: tuple[Tensor | None, ...]) -> Results:
    """The tensors that are not None."""
    return tuple(tensor for tensor in tensors if tensor is not None)
