"""The host memory that an operation needs in addition to its input tensors.

Results are counted exactly.  Temporary memory is bounded for most shapes, since the CPU backend computes in
pieces; only for a row or a group that is longer than a piece do the float32 copies grow with it.  A test compares
this model with measured peaks, which are never more than `SCRATCH_BYTES` above it.
"""

from math import prod
from typing import NamedTuple

from normserve.codec.api_names import OF_SAMPLES, PARAMETERS
from normserve.jobs.job import ChannelLayout, NormSpec, Op, PassDirection
from normserve.jobs.result_specs import Described, LayerParameterSpec, infer_result_specs
from normserve.memory.tensors import DType

PIECE_ELEMENTS = 128 * 1024
"""Elements that the CPU backend computes at once; a test checks that `fusednorm.cpu.chunks.PIECE_ELEMENTS` is
equal.
"""

REUSED_ELEMENTS = 256 * 1024
"""The number of elements above which the CPU backend writes y over x, if their sizes are equal and x is not read
again.

A test checks that `fusednorm.cpu.batch_invariant.row_norms.WHOLE_ELEMENTS` is equal.
"""

SCRATCH_BYTES = 64 * 2**20
"""Scratch memory of the CPU backend, which computes one batch at a time: pieces, small results, and memory that
malloc keeps.
"""


class MemoryCost(NamedTuple):
    """The bytes of host memory that an operation needs in addition to its input tensors.

    Attributes:
        result_bytes: of the results, which are sent to the client.
        temporary_bytes: that the CPU backend needs temporarily, beyond `SCRATCH_BYTES`.
        reusable_bytes: of the results that the CPU backend may write over the input tensors.
    """

    result_bytes: int = 0
    temporary_bytes: int = 0
    reusable_bytes: int = 0

    def count_cpu_bytes(self, *, may_overwrite: bool) -> int:
        """Count the bytes that the CPU backend needs in addition to the input tensors."""
        return self.result_bytes + self.temporary_bytes - (self.reusable_bytes if may_overwrite else 0)


def estimate_memory_cost(spec: NormSpec, given: Described, layer: LayerParameterSpec | None) -> MemoryCost:
    """Estimate the memory that an operation needs in addition to its input tensors.

    Args:
        given: the input tensors, in shapes that fit the spec and one another.
        layer: whose parameters are used, if any.
    """
    results = infer_result_specs(spec, given, layer)
    nbytes = {name: _count_bytes(*described) for name, described in results.items()}
    is_rows = spec.op is not Op.GROUP_NORM
    temporaries = (
        _estimate_cpu_row_temporary_bytes(spec, given, layer)
        if is_rows
        else _estimate_cpu_group_temporary_bytes(spec, given, layer)
    )
    dtype, shape = given["x"]
    is_reused = is_rows and spec.direction is PassDirection.FORWARD and spec.out_dtype in (None, dtype)
    reusable = nbytes["y"] if is_reused and prod(shape) > REUSED_ELEMENTS else 0
    return MemoryCost(sum(nbytes.values()), temporaries, reusable)


def _count_bytes(dtype: DType, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * prod(shape)


def _estimate_cpu_row_temporary_bytes(spec: NormSpec, given: Described, layer: LayerParameterSpec | None) -> int:
    """Estimate the temporary bytes that the CPU backend needs for LayerNorm, RMSNorm or a chain of LayerNorms.

    Most are counted only for rows that are longer than a piece: shorter ones fit into `SCRATCH_BYTES`.
    """
    dtype, shape = given["x"]
    # Channels of a position are no row of memory before they are copied.
    is_copied = spec.is_over_channels
    cols = shape[1] if is_copied else shape[-1]
    of_heads = 0
    if spec.direction is PassDirection.BACKWARD and (heads := _count_heads(given, layer)):
        # Their gradients in float32, which grow with the heads.
        of_heads = 4 * heads * cols * _count_narrow_parameters(given, layer)
    if cols <= PIECE_ELEMENTS or not prod(shape):
        return of_heads
    if spec.op is Op.LAYER_NORM_CHAIN:
        # The input and the output of one norm, and both of its parameters.
        return 4 * cols * (2 + len(PARAMETERS))
    narrow = _count_narrow_parameters(given, layer)
    if spec.weight_offset and _get_weight_dtype(given, layer) is DType.FLOAT32:
        narrow += 1
    if spec.direction is PassDirection.FORWARD:
        # The sum in float32, and its normalised values; later, instead of the sum, 1 + scale.
        floats = 1 + (is_copied or _has_float32_sum(dtype, given) or "scale" in given) + narrow
    else:
        # The sum, dz and dx, and temporaries of RMSNorm's mean of a row; parameters and their gradients once more.
        has_weight = layer is not None or "weight" in given
        floats = (3 if spec.op is Op.LAYER_NORM else 4 + has_weight) + 2 * narrow
        if spec.op is Op.LAYER_NORM and any(name in given for name in OF_SAMPLES):
            # The norm before scale and shift, and a temporary, as RMSNorm has in any case.
            floats += 2
        # Sums over the rows of samples that have several, and dh * x.
        of_samples = [given[name][1] for name in OF_SAMPLES if name in given]
        floats += sum(prod(each) < prod(shape) for each in of_samples) + ("gate" in given)
        floats += is_copied
    floats += is_copied and "residual" in given
    return 4 * cols * floats + (cols if spec.dropout else 0) + of_heads


def _estimate_cpu_group_temporary_bytes(spec: NormSpec, given: Described, layer: LayerParameterSpec | None) -> int:
    """Estimate the temporary bytes that the CPU backend needs for GroupNorm; 0 if a sample fits into one piece.

    A piece is the number of elements that the backend computes at once.
    """
    dtype, shape = given["x"]
    is_last = spec.layout is ChannelLayout.NHWC
    channels = shape[-1] if is_last else shape[1]
    sample = prod(shape[1:])
    if sample <= PIECE_ELEMENTS or not shape[0]:
        return 0
    positions = sample // channels
    group = sample // spec.num_groups
    # Dropout's mask of channels that lie side by side is made for a whole sample.
    mask = sample if spec.dropout and is_last else 0
    # Temporaries with one value per channel, which are large if there are few positions.
    of_channels = 4 * channels * _count_narrow_parameters(given, layer)
    if spec.direction is PassDirection.BACKWARD:
        of_channels += 4 * channels * (2 + 4 * (layer is not None or any(name in given for name in PARAMETERS)))
    if group <= PIECE_ELEMENTS:
        return mask + of_channels
    modulations = sum(name in given for name in OF_SAMPLES)
    if spec.direction is PassDirection.FORWARD:
        floats = 1 + (is_last or _has_float32_sum(dtype, given))
    else:
        # The sum, z, dy and dz; with modulation z once more, and temporaries of its sums over positions.
        floats = 4 + (0 if not modulations else 2 if positions > PIECE_ELEMENTS else 1)
    mask += group if spec.dropout else 0
    return 4 * group * floats + mask + of_channels + 8 * modulations * (group // positions)


def _has_float32_sum(dtype: DType, given: Described) -> bool:
    """Return whether the float32 sum of x and residual is a tensor other than x."""
    return dtype is not DType.FLOAT32 or "residual" in given


def _count_heads(given: Described, layer: LayerParameterSpec | None) -> int:
    """Return the number of heads that have parameters of their own; 0 if all rows have the same parameters."""
    if layer is not None:
        return layer.heads
    return next((given[name][1][0] for name in PARAMETERS if name in given and len(given[name][1]) > 1), 0)


def _get_weight_dtype(given: Described, layer: LayerParameterSpec | None) -> DType:
    return given["weight"][0] if layer is None else layer.dtype


def _count_narrow_parameters(given: Described, layer: LayerParameterSpec | None) -> int:
    """Count the parameters, weight and bias, that need a float32 copy because their type is narrower."""
    dtypes = [given[name][0] for name in PARAMETERS if name in given]
    if layer is not None:
        dtypes = [layer.dtype] * (1 + layer.has_bias)
    return sum(dtype is not DType.FLOAT32 for dtype in dtypes)
