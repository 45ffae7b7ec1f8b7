"""Compilation of kernels before their first use."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusednorm.api import group_norm as group_norm_passes
from fusednorm.api import layer_norm as layer_norm_passes
from fusednorm.arguments.checks import ActivationName, is_integer
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.errors import KernelInputError
from fusednorm.ops.group_norm.backward_choice import choose_backward
from fusednorm.ops.group_norm.call import GroupNormBackwardConfig, GroupNormForwardConfig
from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardSampleStream
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.channels_last.stream_partitions import StreamPartition, make_stream_partition
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident
from fusednorm.ops.group_norm.forward_choice import choose_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.ops.layer_norm.call import SINGLE_ROW_COLS
from fusednorm.policy.cooperative_launches import may_wait
from fusednorm.tensors.devices import describe_device

_OPERATIONS = ("layer_norm", "rms_norm")

_MANY = 1 << 20
"""A number of samples that is enough to use any device fully."""


def _check_dtypes(dtype: torch.dtype, parameter_dtype: torch.dtype | None) -> None:
    """Raise KernelInputError unless both are dtypes of torch, or the second is None."""
    for name, value in (("dtype", dtype), ("parameter_dtype", parameter_dtype or dtype)):
        if not isinstance(value, torch.dtype):
            raise KernelInputError(f"{name} must be a torch.dtype, got {value!r}")


def warmup(
    op: str,
    dtype: torch.dtype,
    cols: int,
    *,
    parameter_dtype: torch.dtype | None = None,
    residual: bool = False,
    scale: bool = False,
    shift: bool = False,
    gate: bool = False,
    activation: ActivationName | None = "none",
    dropout: float = 0.0,
    backward: bool = True,
    device: torch.device | str | None = None,
) -> None:
    """Compile the kernels of LayerNorm or RMSNorm for rows of one length before their first use.

    It runs the operation on one or two rows; the kernels serve any number of aligned rows of `cols` elements.
    These are forward passes with and without statistics and backward passes with and without saved statistics, all
    with a weight, and with a bias if `op` has one.  A call with other options, without parameters, or with rows
    that do not start at multiples of 16 bytes compiles at its first use, as do, for each order of magnitude of rows
    and samples, the kernels that add up the gradients of a backward pass with scale, shift or gate.  Only a GPU has
    kernels to compile: CPU tensors need no warm-up.

    Args:
        op: "layer_norm" or "rms_norm".
        dtype: dtype of x, y and dy: float32, float16 or bfloat16.
        cols: elements of a row, at least 1.
        parameter_dtype: dtype of weight, bias, scale, shift and gate; None (default) for `dtype`.
        residual: whether calls have a residual, of `dtype`; default False.
        scale, shift, gate: whether calls have them; default False.  A gate needs a residual.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh"; the
            kernels of "leaky_relu" serve any negative_slope.
        dropout: probability of a zero, in [0, 1); only whether it is 0 (default) matters here.
        backward: whether to compile the backward passes too; default True.
        device: a CUDA device; None (default) for the current one.

    Raises:
        KernelInputError: op, a dtype, cols or an option is invalid, or the device is not a CUDA device.
        AssertionError, RuntimeError: torch was built without CUDA, or there is no GPU.
        ModuleNotFoundError: Triton is not installed.

    Examples:
        >>> import torch, fusednorm
        >>> if torch.cuda.is_available():
        ...     fusednorm.warmup("layer_norm", torch.bfloat16, 4096)
    """
    if op not in _OPERATIONS:
        raise KernelInputError(f"op must be one of {', '.join(_OPERATIONS)}, got {op!r}")
    _check_dtypes(dtype, parameter_dtype)
    if not is_integer(cols) or cols < 1:
        raise KernelInputError(f"cols must be an int of at least 1, got {cols!r}")
    device = torch.device(device or ("cpu" if INTERPRETED else "cuda"))
    parameters = [torch.zeros(cols, dtype=parameter_dtype or dtype, device=device)] * (1 + (op == "layer_norm"))
    of_sample = parameters[0]
    forward = getattr(layer_norm_passes, f"{op}_forward")
    differentiate = getattr(layer_norm_passes, f"{op}_backward")
    # A single very long row uses another algorithm than several rows.
    for rows in (1, 2) if cols >= SINGLE_ROW_COLS else (1,):
        x = torch.zeros(rows, cols, dtype=dtype, device=device)
        options: dict[str, Any] = {
            "residual": x if residual else None,
            "scale": of_sample if scale else None,
            "shift": of_sample if shift else None,
            "gate": of_sample if gate else None,
            "activation": activation,
            "dropout": dropout,
            "seed": 0 if dropout else None,
        }
        forward(x, *parameters, **options)
        result = forward(x, *parameters, stats=True, **options)
        if backward:
            statistics = {"rstd": result.rstd} if op == "rms_norm" else {"mean": result.mean, "rstd": result.rstd}
            differentiate(x, x, *parameters, **options)
            differentiate(x, x, *parameters, **statistics, **options)


def warmup_group_norm(
    dtype: torch.dtype,
    num_groups: int,
    shape: tuple[int, ...],
    *,
    channels_last: bool = False,
    parameter_dtype: torch.dtype | None = None,
    scale: bool = False,
    shift: bool = False,
    residual: bool = False,
    activation: ActivationName | None = "none",
    dropout: float = 0.0,
    backward: bool = True,
    device: torch.device | str | None = None,
) -> None:
    """Compile the kernels of GroupNorm for samples of one shape before their first use.

    It runs the operation on a few samples; the kernels serve any number of aligned samples of that shape.  These
    are forward passes with and without statistics and backward passes with and without saved statistics, all with
    weight and bias.  A call with other options or without parameters compiles at its first use, as does a backward
    pass over so many samples that their gradients of weight and bias are reduced in two steps.  Only a GPU has
    kernels to compile: CPU tensors need no warm-up.

    Args:
        dtype: dtype of x, y and dy: float32, float16 or bfloat16.
        num_groups: number of groups, an int that divides C.
        shape: the shape of a sample, (C, *spatial), each at least 1.
        channels_last: whether samples are channels-last in memory; default False.
        parameter_dtype: dtype of weight, bias, scale and shift; None (default) for `dtype`.
        scale, shift: whether calls have them; default False.
        residual: whether calls have a residual, of `dtype`; default False.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh"; the
            kernels of "leaky_relu" serve any negative_slope.
        dropout: probability of a zero, in [0, 1); only whether it is 0 (default) matters here.
        backward: whether to compile the backward passes too; default True.
        device: a CUDA device; None (default) for the current one.

    Raises:
        KernelInputError: a dtype, the shape or an option is invalid, or the device is not a CUDA device.
        AssertionError, RuntimeError: torch was built without CUDA, or there is no GPU.
        ModuleNotFoundError: Triton is not installed.

    Examples:
        >>> import torch, fusednorm
        >>> if torch.cuda.is_available():
        ...     fusednorm.warmup_group_norm(torch.bfloat16, 32, (512, 32, 32), channels_last=True)
    """
    _check_dtypes(dtype, parameter_dtype)
    if not isinstance(shape, Sequence) or not shape or not all(is_integer(size) and size >= 1 for size in shape):
        raise KernelInputError(f"shape must be (C, *spatial), each at least 1, got {shape!r}")
    device = torch.device(device or ("cpu" if INTERPRETED else "cuda"))
    weight = torch.zeros(shape[0], dtype=parameter_dtype or dtype, device=device)
    parameters = (num_groups, weight, weight)

    def run_samples(samples: int) -> None:
        x = torch.zeros(samples, *shape, dtype=dtype, device=device)
        if channels_last:
            x = torch.zeros(samples, *shape[1:], shape[0], dtype=dtype, device=device).movedim(-1, 1)
        of_samples = torch.zeros(samples, shape[0], dtype=weight.dtype, device=device)
        options: dict[str, Any] = {
            "residual": x if residual else None,
            "scale": of_samples if scale else None,
            "shift": of_samples if shift else None,
            "activation": activation,
            "dropout": dropout,
            "seed": 0 if dropout else None,
        }
        group_norm_passes.group_norm_forward(x, *parameters, **options)
        result = group_norm_passes.group_norm_forward(x, *parameters, stats=True, **options)
        if backward:
            group_norm_passes.group_norm_backward(x, x, *parameters, **options)
            group_norm_passes.group_norm_backward(x, x, *parameters, mean=result.mean, rstd=result.rstd, **options)

    run_samples(1)
    gpu = describe_device(device)
    multiprocessors = gpu.multiprocessors
    sample = SampleShape(num_groups, shape[0] // num_groups, math.prod(shape[1:]), channels_last)
    config = choose_forward(sample, dtype.itemsize, multiprocessors, may_wait())
    if isinstance(config, GroupNormForwardResident | ForwardResidentBlock) and config.writers > 1:
        # If there are few groups or blocks, several programs write each: another kernel than for many.
        of_sample = (
            num_groups if isinstance(config, GroupNormForwardResident) else -(-num_groups // config.block_groups)
        )
        run_samples(multiprocessors // (2 * of_sample) + 1)
    configs: list[GroupNormForwardConfig | GroupNormBackwardConfig] = [config]
    if backward:
        configs.append(choose_backward(sample, dtype.itemsize, multiprocessors, may_wait()))
    streams = [each for each in configs if isinstance(each, ForwardSampleStream | BackwardSampleStream)]

    def list_partitions(samples: int) -> list[StreamPartition]:
        return [make_stream_partition(sample, dtype.itemsize, stream, samples, gpu) for stream in streams]

    samples = 1
    # Fewer samples are split into more parts.
    while list_partitions(samples) != list_partitions(_MANY):
        samples *= 2
        run_samples(samples)
