"""Detection of tracers, transforms, modes and differentiation, which must observe a call."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_has_storage = torch._C._has_storage
_functorch_transform = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state


def is_observed(*tensors: Tensor | None) -> bool:
    """Return whether torch traces or transforms the call, or a mode or tensor subclass intercepts it.

    Such a call must pass through torch's dispatcher.
    """
    # First, because Dynamo must not trace the other conditions.
    if is_compiling() or _dispatch_modes() or _function_modes() or _functorch_transform() or _tracing_state():
        return True
    # A call that bypasses the dispatcher would lose tangents.
    if forward_ad._current_level >= 0:
        return True
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            return True
        # The dispatcher resolves lazy negation, and batches of torch.autograd, which have no memory of their own.
        if tensor.is_neg() or not _has_storage(tensor):
            return True
    return False


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Return whether autograd needs a gradient of one of the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
