"""LayerNorm and RMSNorm, forward and backward: check, choose a configuration, allocate, launch.

Half of the file is the contract of its four public functions.
"""

import torch
import triton
from torch import Tensor

from fusednorm import launch
from fusednorm._layer_norm_backward_kernels import (
    fold_partials_kernel,
    layer_norm_backward_rows_kernel,
    layer_norm_backward_slab_kernel,
    layer_norm_backward_tile_kernel,
)
from fusednorm._layer_norm_forward_kernels import (
    layer_norm_forward_sweep_kernel,
    layer_norm_forward_tile_kernel,
)
from fusednorm.checks import Epilogue, as_rows, check_eps, check_parameter, check_statistics, check_tensor
from fusednorm.device import INTERPRETED, multiprocessor_count
from fusednorm.epilogue import dropout_threshold
from fusednorm.errors import KernelInputError
from fusednorm.launch import Launch, run
from fusednorm.results import Backward, Forward


def layer_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
) -> Forward:
    """y = dropout(act((h - mean) * rstd * weight + bias)) over the last axis, with h = x + residual.

    Statistics and every intermediate are float32; the variance is taken about a pivot among the row's values,
    so a mean far from zero does not cancel.  A row's bits do not depend on the rows that came with it.

    Args:
        x: [..., cols], float32, float16 or bfloat16, CUDA; the last axis contiguous, rows one stride apart.
        weight: [cols], any of these dtypes, or None for ones.
        bias: [cols], any of these dtypes, or None for zeros.
        eps: added to the variance; positive and finite.
        residual: as x, any of these dtypes.  h is summed in float32 and returned rounded to x's dtype.
        activation: none, relu, silu, gelu (erf) or gelu_tanh.
        dropout: probability of a zero, in [0, 1).
        seed: int64, required with dropout; the same seed gives the same mask in backward.
        out_dtype: y's dtype; x's when None.
        stats: also return mean and rstd, float32 [...].

    Returns:
        Forward: y [..., cols] contiguous; mean and rstd with `stats`; residual_out with a residual.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: strides that no kernel handles; nothing is copied to make them fit.

    Traffic: `traffic.forward_bytes`: x, y, residual and residual_out once each.  Rows longer than one tile
    are read a second time from L1 or L2.

    Source: Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450; partial moments merged as in Chan,
    Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    epilogue = Epilogue(activation, dropout, seed)
    return _forward(x, weight, bias, eps, residual, epilogue, out_dtype, stats, is_rms=False)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
) -> Forward:
    """y = dropout(act(h * rstd * weight)) with rstd = 1 / sqrt(mean(h^2) + eps) and h = x + residual.

    Everything else is as in `layer_norm_forward`; there is no bias and no mean.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    epilogue = Epilogue(activation, dropout, seed)
    return _forward(x, weight, None, eps, residual, epilogue, out_dtype, stats, is_rms=True)


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Backward:
    """dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out with g = dz * weight.

    dz is dy taken back through dropout and the activation; dweight = sum(dz * x_hat) and dbias = sum(dz) over
    the rows.  Sums are float32 in fixed order, without atomics: every run gives the same bits on a device.

    Args:
        dy: gradient of y, shaped and strided as x may be, float32, float16 or bfloat16.
        x, weight, bias, eps, residual, activation, dropout, seed: as they went into the forward pass.
        mean, rstd: the statistics it returned, float32 [...], both or neither; taken anew when absent.
        dresidual_out: as x; what reached h from elsewhere, added to dx.

    Returns:
        Backward: dx [..., cols] contiguous in x's dtype, the gradient of x and of residual alike; dweight in
        weight's dtype when weight came in; dbias in bias's dtype when bias came in.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or one statistic without the other.
        UnsupportedShapeError: strides that no kernel handles.

    Traffic: `traffic.backward_bytes`: dy, x and dx once each; rows too long for a tile cost dy and x twice.

    Source: the derivative of `layer_norm_forward`; see docs/numerics.md.
    """
    if (mean is None) != (rstd is None):
        raise KernelInputError("mean and rstd must come together, got one of them")
    epilogue = Epilogue(activation, dropout, seed)
    return _backward(dy, x, weight, bias, eps, mean, rstd, residual, dresidual_out, epilogue, is_rms=False)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Backward:
    """dx = rstd * (g - x_hat * mean(g * x_hat)) + dresidual_out with g = dz * weight, x_hat = h * rstd.

    Everything else is as in `layer_norm_backward`; there is no bias and no mean.
    """
    epilogue = Epilogue(activation, dropout, seed)
    return _backward(dy, x, weight, None, eps, None, rstd, residual, dresidual_out, epilogue, is_rms=True)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    stats: bool,
    is_rms: bool,
) -> Forward:
    check_eps(eps)
    check_tensor("x", x)
    x_rows = as_rows("x", x)
    rows, cols = x_rows.shape
    check_parameter("weight", weight, cols, x)
    check_parameter("bias", bias, cols, x)
    residual_rows = _rows_like("residual", residual, x)

    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    check_tensor("out_dtype", y)
    residual_out = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats else None
    mean = torch.empty_like(rstd) if rstd is not None and not is_rms else None
    result = Forward(y, mean, rstd, residual_out)
    if rows:
        run(x.device, plan_forward(x_rows, weight, bias, eps, residual_rows, epilogue, result, is_rms))
    return result


def plan_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    out: Forward,
    is_rms: bool,
    config: launch.Forward | None = None,
) -> list[Launch]:
    """The launches of a forward pass over checked [rows, cols] tensors into `out`.

    `config` overrides the table's choice, for benchmarks and compile checks.
    """
    rows, cols = x.shape
    config = config or launch.choose_forward(cols, x.element_size())
    strides = _row_strides(cols, x, residual)
    vec = launch.vector_units(cols, *strides)
    tensors = (x, residual, weight, bias, out.y, out.residual_out, out.mean, out.rstd)
    sizes = (cols // vec, *(stride // vec for stride in strides), eps, *_dropout_arguments(epilogue))
    options = {
        "BLOCK_N": config.block_n,
        "IS_RMS": is_rms,
        "num_warps": config.num_warps,
        **_shared_options(vec, epilogue),
    }
    match config:
        case launch.ForwardTile():
            options |= {
                "CHUNKS": config.chunks,
                "EVEN": cols == config.chunks * config.block_n * config.split,
            }
            programs, mailbox, tile_options = _residents(x, config)
            return [
                Launch(
                    layer_norm_forward_tile_kernel,
                    (programs,),
                    (*tensors, mailbox, rows, *sizes),
                    options | tile_options,
                )
            ]
        case launch.ForwardSweep():
            options |= {"EVEN": cols % config.block_n == 0, "GROUP": 16 // x.element_size()}
            return [Launch(layer_norm_forward_sweep_kernel, (rows,), (*tensors, *sizes), options)]


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    dresidual_out: Tensor | None,
    epilogue: Epilogue,
    is_rms: bool,
) -> Backward:
    check_eps(eps)
    check_tensor("x", x)
    x_rows = as_rows("x", x)
    rows, cols = x_rows.shape
    check_tensor("dy", dy, like=x)
    dy_rows = as_rows("dy", dy)
    check_parameter("weight", weight, cols, x)
    check_parameter("bias", bias, cols, x)
    check_statistics(mean, rstd, x.shape[:-1], x)
    residual_rows = _rows_like("residual", residual, x)
    outside_rows = _rows_like("dresidual_out", dresidual_out, x)

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    result = Backward(dx, dweight, dbias)
    if rows:
        plan = plan_backward(
            dy_rows,
            x_rows,
            weight,
            bias,
            eps,
            mean,
            rstd,
            residual_rows,
            outside_rows,
            epilogue,
            result,
            is_rms,
        )
        run(x.device, plan)
    else:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
    return result


def plan_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    dresidual_out: Tensor | None,
    epilogue: Epilogue,
    out: Backward,
    is_rms: bool,
    config: launch.Backward | None = None,
) -> list[Launch]:
    """The launches of a backward pass over checked [rows, cols] tensors into `out`, workspaces allocated.

    `config` overrides the table's choice, for benchmarks and compile checks.
    """
    rows, cols = x.shape
    config = config or launch.choose_backward(cols, x.element_size())
    strides = _row_strides(cols, dy, x, residual, dresidual_out)
    vec = launch.vector_units(cols, *strides)
    units = tuple(stride // vec for stride in strides)
    dropout = _dropout_arguments(epilogue)
    shared = _shared_options(vec, epilogue)
    tensors = (dy, x, residual, dresidual_out, weight, bias)
    sizes = (rows, cols // vec, *units)
    options = {
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        **shared,
    }
    match config:
        case launch.BackwardTile():
            pipelined = [t for t in (dy, x, residual, dresidual_out) if t is not None]
            if not config.hold_weight:
                pipelined += [t for t in (weight, bias if epilogue.activation != "none" else None) if t is not None]
            config = launch.within_shared_memory(config, sum(t.element_size() for t in pipelined))
            options["EVEN"] = cols == config.block_n * config.split
            programs, mailbox, tile_options = _residents(x, config)
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, programs // config.split)
            options |= {"IS_RMS": is_rms, "HOLD_WEIGHT": config.hold_weight, **tile_options}
            arguments = (
                *tensors, mean, rstd, out.dx, dweight_partial, dbias_partial, mailbox, *sizes, eps, *dropout,
            )  # fmt: skip
            launches = [Launch(layer_norm_backward_tile_kernel, (programs,), arguments, options)]
        case launch.BackwardSlab():
            slabs = triton.cdiv(cols, config.block_n)
            resident = multiprocessor_count(x.device) * config.programs_per_sm
            tiles = min(triton.cdiv(rows, config.rows), max(1, resident // slabs))
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, tiles)
            constants = x.new_empty((rows, 4), dtype=torch.float32)
            rows_arguments = (
                dy, x, residual, weight, bias, mean, rstd, constants, cols // vec, *units[:3], eps, *dropout,
            )  # fmt: skip
            rows_options = {
                "BLOCK_N": config.rows_block_n,
                "GROUP": 16 // x.element_size(),
                "EVEN": cols % config.rows_block_n == 0,
                "IS_RMS": is_rms,
                "num_warps": config.rows_num_warps,
                **shared,
            }
            even = cols % config.block_n == 0
            options |= {"ROWS": config.rows, "STAGES": config.stages, "EVEN": even}
            arguments = (*tensors, constants, out.dx, dweight_partial, dbias_partial, *sizes, *dropout)
            launches = [
                Launch(layer_norm_backward_rows_kernel, (rows,), rows_arguments, rows_options),
                Launch(layer_norm_backward_slab_kernel, (slabs, tiles), arguments, options),
            ]
    if weight is not None or bias is not None:
        launches.append(
            Launch(
                fold_partials_kernel,
                (triton.cdiv(cols, launch.FOLD_BLOCK_N),),
                (dweight_partial, dbias_partial, out.dweight, out.dbias, partials, cols),
                {
                    "BLOCK_P": launch.FOLD_BLOCK_P,
                    "BLOCK_N": launch.FOLD_BLOCK_N,
                    "num_warps": launch.FOLD_NUM_WARPS,
                },
            )
        )
    return launches


def _residents(
    x: Tensor, config: launch.ForwardTile | launch.BackwardTile
) -> tuple[int, Tensor | None, dict[str, object]]:
    """Programs of a persistent tile kernel over x [rows, cols], their mailbox, and the kernel's options."""
    groups = triton.cdiv(x.shape[0], config.rows)
    if config.programs_per_sm:
        resident = multiprocessor_count(x.device) * config.programs_per_sm
        groups = max(1, min(groups, resident // config.split))
    options: dict[str, object] = {
        "ROWS": config.rows,
        "STAGES": config.stages,
        "SPLIT": config.split,
    }
    if config.split == 1:
        return groups, None, options
    programs = groups * config.split
    return (
        programs,
        launch.mailbox(x.device, programs),
        options | {"launch_cooperative_grid": True},
    )


def _partials(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: int
) -> tuple[int, Tensor | None, Tensor | None]:
    """`count`, and workspaces [count, cols] for the partial dweight and dbias of as many programs."""
    both = x.new_empty(((weight is not None) + (bias is not None), count, x.shape[1]), dtype=torch.float32)
    return count, None if weight is None else both[0], None if bias is None else both[-1]


def _rows_like(name: str, tensor: Tensor | None, x: Tensor) -> Tensor | None:
    if tensor is None:
        return None
    check_tensor(name, tensor, like=x)
    return as_rows(name, tensor)


def _row_strides(cols: int, *tensors: Tensor | None) -> tuple[int, ...]:
    """Elements between rows; cols where it does not matter, so that it costs no vector width."""
    return tuple(cols if tensor is None or tensor.shape[0] == 1 else tensor.stride(0) for tensor in tensors)


def _dropout_arguments(epilogue: Epilogue) -> tuple[int, int, float]:
    return epilogue.seed or 0, dropout_threshold(epilogue.dropout), 1.0 / (1.0 - epilogue.dropout)


def _shared_options(vec: int, epilogue: Epilogue) -> dict[str, object]:
    return {
        "VEC": vec,
        "ACTIVATION": epilogue.activation,
        "DROPOUT": epilogue.dropout > 0.0,
        "FAST": not INTERPRETED,
    }
