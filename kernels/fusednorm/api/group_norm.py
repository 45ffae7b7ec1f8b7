"""GroupNorm, forward and backward, in both layouts: check, allocate, plan, launch."""

import torch
from torch import Tensor

from fusednorm.arguments.checks import ActivationName, check_out_dtype
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.options import NormOptions, OptionValues, is_replayable
from fusednorm.errors import KernelInputError
from fusednorm.launch.execution import run_launches
from fusednorm.launch.replay_cache import ReplayablePass
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.backward_choice import plan_backward
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormForwardCall
from fusednorm.ops.group_norm.checks import check_sample
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.outputs import declare_backward_outputs, declare_forward_outputs
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_inputs, name_dtype
from fusednorm.tensors.outputs import describe_results, prepare_result_tensors

FORWARD = ReplayablePass(Forward)
BACKWARD = ReplayablePass(Backward)


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
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """Compute the forward pass of GroupNorm by kernels; autograd does not see it.

    y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) * rstd * weight + bias, h = x + residual, with the
    statistics of each group.  scale and shift are the affine step per sample of adaptive GroupNorm (`scale_shift`
    of a time embedding).

    Statistics and every intermediate are float32; variances are computed about pivots within the range of the
    values and merged by Chan's formula, so a mean far from zero causes no cancellation.

    The tensors must be CUDA tensors.  `fusednorm.reference.group_norm_forward` computes this on the CPU, with
    these arguments except `out`; `fusednorm.group_norm` is differentiable and takes tensors of either device.

    Args:
        x: [N, C, *spatial], float32, float16 or bfloat16; contiguous, or channels-last by its strides.
        num_groups: number of groups, an int that divides C.
        weight: [C], any of these dtypes; None (default) for ones.
        bias: [C], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        residual: x's shape, any of these dtypes, contiguous or channels-last, or None (default).  h is returned in
            x's dtype and layout.
        scale: [N, C], any of these dtypes, or None (default) for zeros; each sample's channels contiguous.
        shift: [N, C], any of these dtypes, or None (default) for zeros; with scale's stride between samples: both
            may be halves of one [N, 2 * C].
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  The mask counts a sample's elements in memory
            order, so it depends on the layout.
        seed: int64, required with dropout; the same seed gives the same mask in backward.
        out_dtype: y's dtype: float32, float16 or bfloat16; None (default) for x's.
        stats: whether to return mean and rstd too; default False.
        out: tensors for the results, each with its result's shape, dtype and layout, in memory of its own; fields
            that are None are allocated.

    Returns:
        Forward: y in x's layout; mean and rstd, float32 [N, num_groups], with `stats`; residual_out with a
            residual.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or an empty group.
        UnsupportedShapeError: x or residual is neither contiguous nor channels-last; scale and shift of other
            strides; nothing is copied to make them fit.  Or the call needs 2^31 programs or more.
        ModuleNotFoundError: Triton is not installed.

    Traffic: `traffic.compute_forward_bytes`: x, y, residual and residual_out once each.  Groups too large for
    one program's registers are read again from L1 or L2, still larger ones from memory.  A residual of another
    layout than x is first copied: one more read and write, and memory for the copy.

    Source: Wu, He: Group Normalization, arXiv:1803.08494; moments merged as in Chan, Golub, LeVeque, 1979.

    Examples:
        >>> import torch, fusednorm
        >>> passes = fusednorm if torch.cuda.is_available() else fusednorm.reference
        >>> x = torch.randn(2, 64, 16, 16).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> result = passes.group_norm_forward(x, 32, stats=True)
        >>> result.y.shape, result.rstd.shape
        (torch.Size([2, 64, 16, 16]), torch.Size([2, 32]))
    """
    values: OptionValues = "group_norm", num_groups, eps, 0.0, activation, dropout, seed, negative_slope, None
    tensors, kind = (x, weight, bias, residual, scale, shift, None), (values, out_dtype, stats)
    may_repeat = is_replayable(values)
    repeated = FORWARD.try_replay(tensors, kind, out) if may_repeat else None
    if repeated is not None:
        return repeated
    inputs, options = NormInputs._make(tensors), NormOptions._make(values).validate()
    arrays, named = describe_inputs(inputs)
    sample = check_sample(options, arrays)
    y_dtype = arrays.x.dtype
    if out_dtype is not None:
        y_dtype = name_dtype(out_dtype)
        check_out_dtype(y_dtype)
    outputs = declare_forward_outputs(arrays.x, sample, arrays.residual, y_dtype, stats)
    result = prepare_result_tensors(Forward, outputs, x, out)
    if x.shape[0]:
        call = GroupNormForwardCall(
            x=arrays.x,
            sample=sample,
            affine=AffineParameters(arrays.weight, arrays.bias, arrays.scale, arrays.shift),
            options=options,
            residual=arrays.residual,
            out=Forward(*describe_results(outputs, result, arrays.x, out, named)),
        )
        launches = plan_forward(call)
        run_launches(x.device, launches, named)
        if may_repeat:
            FORWARD.record(launches, outputs, named, inputs, kind)
    return result


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
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """Compute the gradients of GroupNorm's inputs by one backward pass.

    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out over groups, f = 1 + scale, g = dz * f *
    weight, where dz is the gradient of the affine steps' output.  Over positions dshift = sum(dz) and dscale =
    sum(dz * (x_hat * weight + bias)); over samples and positions dbias = sum(dz * f) and dweight = sum(dz * f *
    x_hat).  Sums of centred values are float32, in fixed order and without atomics: every run gives the same bits.

    The tensors must be CUDA tensors.  `fusednorm.reference.group_norm_backward` computes this on the CPU, with
    these arguments except `out`; `fusednorm.group_norm` is differentiable and takes tensors of either device.

    Args:
        dy: gradient of y: x's shape, float32, float16 or bfloat16; contiguous or channels-last.
        x: the forward pass's x: [N, C, *spatial], float32, float16 or bfloat16; contiguous or channels-last.
        num_groups: number of groups, an int that divides C.
        weight, bias: the forward pass's: [C], any of these dtypes, or None (default).
        eps: added to the variance; at least 0 and finite; default 1e-5.
        mean, rstd: the forward pass's statistics, float32 [N, num_groups], both or neither; None (default)
            computes them again.
        residual: the forward pass's: x's shape, any of these dtypes, or None (default).
        dresidual_out: gradient of residual_out, added to dx: x's shape, any of these dtypes, contiguous or
            channels-last; None (default) for zeros.
        scale, shift: the forward pass's: [N, C], any of these dtypes, or None (default).
        activation, negative_slope: the forward pass's; defaults "none" and 0.01.
        dropout, seed: the forward pass's; defaults 0.0 and None.
        parameter_gradients: whether to compute dweight and dbias; default True.
        out: tensors for the gradients, each with its shape, dtype and layout, in memory of its own; fields that
            are None are allocated.

    Returns:
        Backward: dx in x's dtype and layout, the gradient of both x and residual; dweight in weight's dtype if
            weight is not None; dbias, dscale and dshift likewise; dweight and dbias only with
            `parameter_gradients`.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or one statistic without the other.
        UnsupportedShapeError: x, dy, residual or dresidual_out is neither contiguous nor channels-last; scale and
            shift of other strides; nothing is copied to make them fit.  Or the call needs 2^31 programs or more.
        ModuleNotFoundError: Triton is not installed.

    Traffic: `traffic.compute_backward_bytes`: dy, x and dx once each; larger groups read dy and x again from
    L2, still larger ones from memory, where absent statistics cost another read of x.  A dy, residual or
    dresidual_out of another layout than x is first copied.

    Examples:
        >>> import torch, fusednorm
        >>> passes = fusednorm if torch.cuda.is_available() else fusednorm.reference
        >>> x = torch.randn(2, 64, 16, 16).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> gradients = passes.group_norm_backward(torch.ones_like(x), x, 32, torch.ones_like(x[0, :, 0, 0]))
        >>> gradients.dx.shape, gradients.dweight.shape
        (torch.Size([2, 64, 16, 16]), torch.Size([64]))
    """
    values: OptionValues = "group_norm", num_groups, eps, 0.0, activation, dropout, seed, negative_slope, None
    tensors = x, weight, bias, residual, scale, shift, None, mean, rstd, dy, dresidual_out
    kind = values, parameter_gradients
    may_repeat = is_replayable(values)
    repeated = BACKWARD.try_replay(tensors, kind, out) if may_repeat else None
    if repeated is not None:
        return repeated
    inputs, options = BackwardInputs._make(tensors), NormOptions._make(values)
    if (mean is None) != (rstd is None):
        raise KernelInputError("mean and rstd must be passed together, got one of them")
    options = options.validate()
    arrays, named = describe_inputs(inputs)
    sample = check_sample(options, arrays)
    parameters = (arrays.weight, arrays.bias) if parameter_gradients else (None, None)
    outputs = declare_backward_outputs(arrays.x, (*parameters, arrays.scale, arrays.shift), residual is not None)
    result = prepare_result_tensors(Backward, outputs, x, out)
    if x.shape[0]:
        call = GroupNormBackwardCall(
            dy=arrays.dy,
            x=arrays.x,
            sample=sample,
            affine=AffineParameters(arrays.weight, arrays.bias, arrays.scale, arrays.shift),
            options=options,
            mean=arrays.mean,
            rstd=arrays.rstd,
            residual=arrays.residual,
            dresidual_out=arrays.dresidual_out,
            out=Backward(*describe_results(outputs, result, arrays.x, out, named)),
        )
        launches = plan_backward(call)
        run_launches(x.device, launches, named)
        if may_repeat:
            BACKWARD.record(launches, outputs, named, inputs, kind)
    else:
        for gradient in (result.dweight, result.dbias):
            if gradient is not None:
                gradient.zero_()
    return result
