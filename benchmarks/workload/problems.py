"""The tensors of a cell, and a provider's run with them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.workload.benchmark_cells import KernelCell

EPS = 1e-5
SEED = 1

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
        """x, dy or residual in x's layout; weight or bias in the parameters' shape; scale or shift [N, C]."""
        key = (cell.shape, cell.dtype, cell.layout)
        if key != self._key:
            self._key, self._kept = key, {}
        is_parameter = role in ("weight", "bias", "scale", "shift")
        shape = cell.shape
        if is_parameter:
            shape = cell.parameter_shape if role in ("weight", "bias") else cell.shape[:2]
        dtype = cell.variant_options.residual_dtype if role == "residual" else None
        own_key = (role, shape, dtype)
        if own_key not in self._kept:
            layout = "rows" if is_parameter else cell.layout
            self._kept[own_key] = self._make_random(shape, dtype or getattr(torch, cell.dtype), layout)
        return self._kept[own_key]

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
    def sample_parameters(self) -> dict[str, Tensor]:
        """scale and shift by name, [N, C], or nothing."""
        return {
            role: self.tensors.get_tensor(role, self.cell) for role in self.cell.variant_options.modulation_roles
        }

    @property
    def min_bytes(self) -> int:
        """The minimum number of bytes that the pass must move."""
        return self.cell.variant_options.compute_min_bytes(self.cell.pass_, self.x.numel(), self.x.dtype)


@dataclass(frozen=True, slots=True)
class ProviderRun:
    """A provider's implementation of a problem.

    Attributes:
        call: the whole pass, with all work that it needs; returns (y[, residual_out][, scale]), or
            (dx[, dweight][, dbias][, dscale, dshift][, dresidual]) with dresidual only if it is not dx.
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
