"""GroupNorm, forward and backward, in both layouts: check, allocate, plan, launch."""

import torch
from torch import Tensor

from fusednorm.arguments.checks import ActivationName, check_out_dtype
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.options import NormOptions, OptionValues, is_replayable
from fusednorm.errors import KernelInputError
from fusednorm.launch.replay import ReplayablePass
from fusednorm.launch.run import run_launches
from fusednorm.ops.group_norm.affine import AffineParameters
from fusednorm.ops.group_norm.backward_choice import plan_backward
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormForwardCall
from fusednorm.ops.group_norm.checks import check_sample
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.outputs import declare_backward_outputs, declare_forward_outputs
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_inputs, name_dtype
from fusednorm.tensors.outputs import describe_results, places

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
    activation: ActivationName = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """Compute y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) * rstd * weight + bias.

    The moments are those of each group.

    h = x + residual.  scale and shift are those of adaptive GroupNorm: an affine step per sample after the common
    one, in the form that diffusion models use (`scale_shift` of a time embedding).

    Statistics and every intermediate are float32; variances are computed about pivots within the range of the
    values and merged by Chan's formula, so a mean far from zero causes no cancellation.  A sample's bits do not
    depend on the other samples.

    Args:
        x: [N, C, *spatial], float32, float16 or bfloat16, CUDA; contiguous, or channels-last by its strides.
        num_groups: divides C.
        weight: [C], any of these dtypes, or None for ones.
        bias: [C], any of these dtypes, or None for zeros.
        eps: added to the variance; at least 0 and finite.
        residual: x's shape, any of these dtypes, contiguous or channels-last.  h is summed in float32 and returned
            rounded to x's dtype, in x's layout.
        scale: [N, C] float32 or any of these dtypes, or None for zeros; each sample's channels contiguous.
        shift: as scale, with the same stride between samples: both may be halves of one [N, 2 * C].
        activation: none, relu, silu, gelu (erf) or gelu_tanh.
        dropout: probability of a zero, in [0, 1).  The mask counts a sample's elements in memory order, so a
            channels-last x has another mask than a contiguous one.
        seed: int64, required with dropout; the same seed gives the same mask in backward.
        out_dtype: y's dtype; x's when None.
        stats: also return mean and rstd, float32 [N, num_groups].
        out: tensors to write results to, each with its result's shape, dtype and layout, in memory of its own;
            results for fields that are None are allocated.

    Returns:
        Forward: y in x's layout; mean and rstd with `stats`; residual_out with a residual.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or an empty group.
        UnsupportedShapeError: x or residual is neither contiguous nor channels-last, or scale and shift have other
            strides than above; nothing is copied to make them fit.  Or the call needs 2^31 programs or more.

    Traffic: `traffic.compute_forward_bytes`: x, y, residual and residual_out once each.  Groups too large for one
    program's registers are read a second time from L1 or L2, still larger ones from memory.  If residual has
    another layout than x, it is first copied into x's: one more read and write, and memory for the copy during the
    call.

    Source: Wu, He: Group Normalization, arXiv:1803.08494; partial moments merged as in Chan, Golub, LeVeque:
    Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    values: OptionValues = "group_norm", num_groups, eps, 0.0, activation, dropout, seed
    tensors, kind = (x, weight, bias, residual, scale, shift), (values, out_dtype, stats)
    may_repeat = is_replayable(values)
    repeated = FORWARD.replay(tensors, kind, out) if may_repeat else None
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
    result = places(Forward, outputs, x, out)
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
    activation: ActivationName = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """Compute dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out, over groups.

    dz is the gradient of the affine step's output, f = 1 + scale and g = dz * f * weight.  Over positions dshift =
    sum(dz) and dscale = sum(dz * (x_hat * weight + bias)); over samples and positions dbias = sum(dz * f) and
    dweight = sum(dz * f * x_hat).  Sums of centred values are float32, in fixed order and without atomics: every
    run gives the same bits.

    Args:
        dy: gradient of y, in x's shape, float32, float16 or bfloat16; contiguous or channels-last.
        x, num_groups, weight, bias, eps, residual, scale, shift, activation, dropout, seed: the arguments of the
            forward pass.
        mean, rstd: the statistics from the forward pass, float32 [N, num_groups], both or neither; computed
            again if absent.
        dresidual_out: as dy; the gradient of residual_out, added to dx.
        parameter_gradients: whether dweight and dbias are wanted; without them there is less to compute.
        out: tensors to write the gradients to, as in the forward pass.

    Returns:
        Backward: dx in x's dtype and layout, the gradient of both x and residual; dweight in weight's dtype if
        weight is not None; dbias, dscale and dshift likewise; dweight and dbias only if they are wanted.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or one statistic without the other.
        UnsupportedShapeError: x, dy, residual or dresidual_out is neither contiguous nor channels-last, or
            scale and shift have strides that the forward pass does not support.  Or the call needs 2^31 programs or
            more.

    Traffic: `traffic.compute_backward_bytes`: dy, x and dx once each; larger groups read dy and x a second time
    from L2, still larger ones from memory, where absent statistics cost another read of x.  If dy, residual or
    dresidual_out has another layout than x, it is first copied as in the forward pass.

    Source: the derivative of `group_norm_forward`; see docs/numerics.md.
    """
    values: OptionValues = "group_norm", num_groups, eps, 0.0, activation, dropout, seed
    tensors = x, weight, bias, residual, scale, shift, mean, rstd, dy, dresidual_out
    kind = values, parameter_gradients
    may_repeat = is_replayable(values)
    repeated = BACKWARD.replay(tensors, kind, out) if may_repeat else None
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
    result = places(Backward, outputs, x, out)
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
