"""The arguments of a GroupNorm forward pass, and what its plans share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusednorm.checks import Epilogue
from fusednorm.device import INTERPRETED, since_hopper
from fusednorm.launch.launch import has_lane_a_thread
from fusednorm.ops.group_norm.sample import Sample, vector_width
from fusednorm.results import Forward


def empty_statistics(x: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """Room for two float32 values of each group, [N, groups]."""
    shape = (x.shape[0], sample.groups)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def pair(x: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    """Room for two float32 tensors of that shape on x's device, one behind the other."""
    first, second = x.new_empty((2, *shape), dtype=torch.float32).unbind()
    return first, second


def epilogue_options(epilogue: Epilogue) -> dict[str, object]:
    """The constexprs that say what follows the affine step."""
    return {
        "ACTIVATION": epilogue.activation,
        "DROPOUT": epilogue.dropout > 0.0,
        "FAST": not INTERPRETED,
    }


def sample_stride(scale: Tensor | None, shift: Tensor | None) -> int:
    """Elements from sample to sample of scale and of shift, [N, C]; 0 where it does not matter."""
    tensor = shift if scale is None else scale
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """The checked arguments of one forward pass."""

    x: Tensor
    sample: Sample
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    residual: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    epilogue: Epilogue
    out: Forward

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def early(self) -> bool:
        """Whether a kernel may start before the one before it ends."""
        return since_hopper(self.x.device)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """x, what is added to it, what follows the norm, and the outputs."""
        return (
            self.x, self.residual, self.weight, self.bias, self.scale, self.shift, self.out.y, self.out.residual_out
        )  # fmt: skip

    @property
    def statistics(self) -> tuple[Tensor | None, ...]:
        return self.out.mean, self.out.rstd

    @property
    def scale_stride(self) -> int:
        """Elements from sample to sample of scale and of shift."""
        return sample_stride(self.scale, self.shift)

    @property
    def group_vec(self) -> int:
        """Elements of one access where groups are contiguous."""
        return vector_width(self.x.element_size(), self.sample.group_length)

    @property
    def group_units(self) -> int:
        return self.sample.group_length // self.group_vec

    @property
    def channel_walk(self) -> tuple[int, ...]:
        """`walk` of kernels that find the channel of each vector of `group_vec` elements, where it has one."""
        return self.walk(self.group_vec if self.sample.hw % self.group_vec == 0 else 1)

    @property
    def is_skewed(self) -> bool:
        """Whether contiguous groups do not all start at multiples of 16 bytes, but samples do."""
        sample, vector = self.sample, 16 // self.x.element_size()
        return sample.group_length % vector != 0 and sample.c * sample.hw % vector == 0

    @property
    def has_lane_a_thread(self) -> bool:
        """`launch.has_lane_a_thread` of pieces of contiguous groups, which may be skewed."""
        width = 16 if self.is_skewed else self.group_vec * self.x.element_size()
        return has_lane_a_thread(width, self.x, self.residual, self.out.y, self.out.residual_out)

    def walk(self, unit: int) -> tuple[int, ...]:
        """Groups, channels, what finds the channel of a unit of elements, and the stride of scale and shift."""
        return self.sample.groups, self.sample.channels, *_division(self.sample.hw // unit), self.scale_stride

    def contiguous_options(self, units: int, num_warps: int) -> dict[str, object]:
        """Constexprs of the kernels that walk contiguous groups."""
        return {
            "VEC": self.group_vec,
            "UNITS": units,
            "ALIGNED": self.sample.hw % self.group_vec == 0,
            "num_warps": num_warps,
            **epilogue_options(self.epilogue),
        }


def _division(divisor: int) -> tuple[int, int, int]:
    """The divisor, and the multiplier and shift that divide any i < 2^31 by it."""
    shift = (divisor - 1).bit_length()
    return divisor, -(-(1 << (31 + shift)) // divisor), shift
