"""The protocol's names of element types."""

from normserve.errors import UnsupportedDtypeError
from normserve.memory.tensors import DType

DTYPES = {"FP32": DType.FLOAT32, "FP16": DType.FLOAT16, "BF16": DType.BFLOAT16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def parse_datatype(name: str, datatype: str) -> DType:
    """Convert the protocol's name of a datatype, for example `FP16`, to an element type.

    Args: name: the tensor's name, for the error's message.

    Raises:
        UnsupportedDtypeError: the server does not support the datatype.
    """
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise UnsupportedDtypeError(f"{name[:64]!r} must be one of {', '.join(DTYPES)}, got {datatype[:32]!r}")
    return dtype
