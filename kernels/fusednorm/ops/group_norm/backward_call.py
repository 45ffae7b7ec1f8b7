"""The arguments of a GroupNorm backward pass, and what its plans share."""

from dataclasses import dataclass, replace

from torch import Tensor

from fusednorm.checks import Epilogue
from fusednorm.device import since_hopper
from fusednorm.launch.launch import Launch
from fusednorm.ops.group_norm.checks import lies_otherwise
from fusednorm.ops.group_norm.forward_call import empty_statistics, epilogue_options, pair, sample_stride
from fusednorm.ops.group_norm.forward_plan import plan_statistics
from fusednorm.ops.group_norm.gradients import derivative_gain
from fusednorm.ops.group_norm.sample import Sample, vector_width
from fusednorm.results import Backward


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """The checked arguments of one backward pass."""

    dy: Tensor
    x: Tensor
    sample: Sample
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    mean: Tensor | None
    rstd: Tensor | None
    residual: Tensor | None
    dresidual_out: Tensor | None
    epilogue: Epilogue
    out: Backward
    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def early(self) -> bool:
        """Whether a kernel may start before the one before it ends."""
        return since_hopper(self.x.device)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.dy, self.x, self.residual

    @property
    def affine(self) -> bool:
        return any(parameter is not None for parameter in self.affine_parameters)

    @property
    def gradient_options(self) -> dict[str, object]:
        """The constexprs that say how dy leads back to dz."""
        gain = derivative_gain(self.epilogue.activation, self.x.element_size())
        return {"GAIN": gain, **epilogue_options(self.epilogue)}

    def lies_otherwise(self, tensor: Tensor | None) -> bool:
        """Whether a companion of x is in the other of the two layouts."""
        return lies_otherwise(tensor, self.sample.channels_last)

    @property
    def channel_vec(self) -> int:
        """Elements of one access where channels are contiguous."""
        return vector_width(self.x.element_size(), self.sample.hw)

    @property
    def scale_stride(self) -> int:
        """Elements from sample to sample of scale and of shift."""
        return sample_stride(self.scale, self.shift)

    @property
    def affine_parameters(self) -> tuple[Tensor | None, ...]:
        """What makes z of x_hat: weight, bias, scale, shift."""
        return self.weight, self.bias, self.scale, self.shift

    def parts(self, splits: int) -> tuple[Tensor, Tensor]:
        """Room for the sums of dz and of dz * x_hat, float32 [N * splits, C] each."""
        return pair(self.x, self.n * splits, self.sample.c)

    def wanted_parts(self, splits: int) -> tuple[Tensor | None, Tensor | None]:
        """`parts`, or twice None where nothing will be folded from them."""
        if not self.affine:
            return None, None
        return self.parts(splits)

    def with_statistics(self) -> tuple["BackwardCall", list[Launch]]:
        """The call with mean and rstd, and what fills them first where they did not come."""
        if self.mean is not None:
            return self, []
        mean, rstd = empty_statistics(self.x, self.sample)
        launches = plan_statistics(self.x, self.sample, self.eps, self.residual, mean, rstd)
        return replace(self, mean=mean, rstd=rstd), launches
