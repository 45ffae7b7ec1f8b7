"""Detection of tracers, transforms, modes and differentiation, which have to see a call."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_transform = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state


def is_observed(*tensors: Tensor | None) -> bool:
    """Whether the call is traced, transformed or observed, or a tensor is of a kind that does so itself."""
    # First: while Dynamo traces, the others are not for it to see.
    if is_compiling() or _dispatch_modes() or _function_modes() or _functorch_transform() or _tracing_state():
        return True
    # Tangents would be lost on the way around the dispatcher.
    if forward_ad._current_level >= 0:
        return True
    for tensor in tensors:
        if tensor is None:
            continue
        # What is lazily negated is made good on the way through the dispatcher.
        if (type(tensor) is not Tensor and type(tensor) is not Parameter) or tensor.is_neg():
            return True
    return False


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of the tensors will be asked for."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
