"""Definitions of the `torch.library` operators, whose implementations are imported at the first call.

Definitions import no module that imports torch, so that they can be made at the end of torch's import, whichever
module of this package it is that imports torch.
"""

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fusednorm.arguments.inputs import OPERATIONS, BackwardInputs, NormInputs
from fusednorm.arguments.operator_arguments import format_argument_schema

if TYPE_CHECKING:
    from torch.library import Library

_DISPATCH_KEYS = ("CPU", "CUDA", "Autograd", "FuncTorchBatched")
_FORWARD_SCHEMA = (
    f"({format_argument_schema(NormInputs, 'x')}) -> (Tensor y, Tensor mean, Tensor rstd, Tensor residual_out)"
)
_BACKWARD_SCHEMA = (
    f"({format_argument_schema(BackwardInputs, 'dy', 'x', 'rstd')}) "
    f"-> ({', '.join(f'Tensor d{name}' for name in NormInputs._fields)})"
)


@cache
def define_operators() -> "Library":
    """Define the operators of all operations with torch, once in a process, and return their library."""
    from torch.library import Library, register_fake

    library = Library("fusednorm", "DEF")
    for op in OPERATIONS:
        for name, schema in ((op, _FORWARD_SCHEMA), (f"{op}_backward", _BACKWARD_SCHEMA)):
            library.define(name + schema)
            for key in _DISPATCH_KEYS:
                implementation = partial(_call_implementation, name, key)
                library.impl(name, implementation, key, with_keyset=key == "Autograd")
            register_fake(f"fusednorm::{name}", partial(_call_implementation, name, "fake"), lib=library)
    return library


def _call_implementation(name: str, key: str, *arguments: Any) -> Any:
    """Call an operator's implementation for a dispatch key, or its fake."""
    from fusednorm.api.operators import IMPLEMENTATIONS

    return IMPLEMENTATIONS[name, key](*arguments)
