"""Fusion of a norm and the modulation after it, in modules whose own code computes norm(x) * (1 + scale) + shift.

The modules are the adaptive norms of diffusers and transformers, which are found by the names of their classes and
by their results.  The norm inside stays unchanged for all other callers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fusednorm.api.module_norms import compute_group_norm_module
from fusednorm.api.patching.activation_modules import has_hooks
from fusednorm.api.patching.forward_probes import copy_without_hooks
from fusednorm.api.patching.norm_forwards import LayerNormForward
from fusednorm.api.patching.norm_recognition import UnpatchableModuleError, check_not_replaced, get_input_name
from fusednorm.api.patching.patched_forward import (
    ForwardReplacement,
    PatchedForward,
    is_supported_input,
    widen_to_modulation,
)
from fusednorm.errors import KernelInputError

_COLS, _CONDITION = 4, 5
"""The widths of rows and of the condition in the sample that is compared."""


class ModulationParts(NamedTuple):
    """The parts of an adaptive norm's projection.

    Attributes:
        scale, shift: [N, cols], [cols] for all rows, or of as many axes as x; None without a shift.
        others: what the module returns beside y.
    """

    scale: Tensor
    shift: Tensor | None
    others: tuple[Tensor, ...] = ()


class AdaptiveClass(NamedTuple):
    """A class of adaptive norms.

    Attributes:
        split: computes the parts from the module and the arguments of its forward.
        part_count: the number of parts that the module's `linear` computes.
        condition: the name of the forward's argument with the condition.
        options: the options that replace the modulation, for the report.
    """

    split: Callable[..., ModulationParts]
    part_count: int
    condition: str
    options: str = "scale and shift"


class AdaptiveNormForward(PatchedForward):
    """Forward of an adaptive LayerNorm or RMSNorm that computes norm and modulation in one call.

    Args:
        module, input_name: as in `PatchedForward`.
        adaptive: the module's class.
    """

    x_dim = 3

    def __init__(self, module: nn.Module, input_name: str, adaptive: AdaptiveClass) -> None:
        super().__init__(module, input_name)
        self.adaptive = adaptive

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module: Any = self.module
        is_traced_elsewhere = is_compiling() and not self.traces_operator
        if is_traced_elsewhere or not (inputs and self._can_fuse(module, inputs[0])):
            return type(module).forward(module, *inputs, **named)
        return self.compute_adaptive(module, *inputs, **named)

    def compute_adaptive(self, module: Any, x: Tensor, *inputs: Any, **named: Any) -> Any:
        """Compute the results of the module's forward for an x that the kernels support."""
        scale, shift, others = self.adaptive.split(module, x, *inputs, **named)
        try:
            y = self._compute_norm(module, x, scale, shift)
        except KernelInputError:
            y = self._compute_in_steps(module, x, scale, shift)
        return (y, *others) if others else y

    def _can_fuse(self, module: Any, x: Any) -> bool:
        """Return whether the kernels support x, and the norm inside is patched and has no hooks."""
        norm = module.norm
        is_patched = isinstance(norm.forward, PatchedForward) and norm.forward.can_modulate
        return is_supported_input(x) and x.dim() == self.x_dim and is_patched and not has_hooks(norm)

    def _compute_norm(self, module: Any, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        """Compute norm(x) * (1 + scale) + shift in one call.

        Raises:
            KernelInputError: the kernels do not support the call.
        """
        y: Tensor = module.norm.forward.compute(module.norm, x, **_name_modulation(scale, shift))
        return y

    def _compute_in_steps(self, module: Any, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        """Compute norm(x) * (1 + scale) + shift as the module's class does."""
        y: Tensor = module.norm(x) * (1 + _expand_to_tokens(scale))
        return y if shift is None else y + _expand_to_tokens(shift)


class AdaptiveGroupNormForward(AdaptiveNormForward):
    """Forward of diffusers' AdaGroupNorm that computes norm and modulation in one call."""

    traces_operator = True
    x_dim = 4

    def _can_fuse(self, module: Any, x: Any) -> bool:
        return is_supported_input(x) and x.dim() == self.x_dim

    def _compute_norm(self, module: Any, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        modulation = _name_modulation(scale, shift)
        x = widen_to_modulation(x, **modulation)
        return compute_group_norm_module(x, module.num_groups, None, None, module.eps, **modulation)

    def _compute_in_steps(self, module: Any, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        z = nn.functional.group_norm(x, module.num_groups, eps=module.eps) * (1 + scale[:, :, None, None])
        return z if shift is None else z + shift[:, :, None, None]


def _split_layer_norm(
    module: Any, x: Tensor, timestep: Tensor | None = None, temb: Tensor | None = None
) -> ModulationParts:
    if module.emb is not None:
        temb = module.emb(timestep)
    projected = module.linear(module.silu(temb))
    if module.chunk_dim == 1:
        shift, scale = projected.chunk(2, dim=1)
    else:
        scale, shift = projected.chunk(2, dim=0)
        if projected.dim() == 2:
            # The class adds no axis for the tokens: these parts have a row for each token, not for each sample.
            scale, shift = scale[None], shift[None]
    return ModulationParts(scale, shift)


def _split_zero(
    module: Any,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
    emb: Tensor | None = None,
) -> ModulationParts:
    if module.emb is not None:
        emb = module.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, *others = module.linear(module.silu(emb)).chunk(6, dim=1)
    return ModulationParts(scale, shift, tuple(others))


def _split_zero_of_condition(module: Any, x: Tensor, emb: Tensor | None = None) -> ModulationParts:
    shift, scale, *others = module.linear(module.silu(emb)).split(x.shape[-1], dim=1)
    return ModulationParts(scale, shift, tuple(others))


def _split_zero_without_shift(module: Any, x: Tensor, emb: Tensor | None = None) -> ModulationParts:
    scale, *others = module.linear(module.silu(emb)).chunk(4, dim=1)
    return ModulationParts(scale, None, tuple(others))


def _split_final(module: Any, x: Tensor, emb: Tensor) -> ModulationParts:
    return ModulationParts(*module.linear(module.silu(emb)).chunk(2, dim=1))


def _split_continuous(module: Any, x: Tensor, conditioning_embedding: Tensor) -> ModulationParts:
    return ModulationParts(*module.linear(module.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1))


def _split_continuous_linear(module: Any, x: Tensor, conditioning_embedding: Tensor) -> ModulationParts:
    return ModulationParts(*module.linear(conditioning_embedding.to(x.dtype)).chunk(2, dim=1))


def _split_group_norm(module: Any, x: Tensor, emb: Tensor) -> ModulationParts:
    return ModulationParts(*module.linear(module.act(emb) if module.act else emb).chunk(2, dim=1))


_CLASSES = {
    "AdaGroupNorm": AdaptiveClass(_split_group_norm, 2, "emb"),
    "AdaLayerNorm": AdaptiveClass(_split_layer_norm, 2, "temb"),
    "AdaLayerNormContinuous": AdaptiveClass(_split_continuous, 2, "conditioning_embedding"),
    "AdaLayerNormZero": AdaptiveClass(_split_zero, 6, "emb"),
    "AdaLayerNormZeroSingle": AdaptiveClass(_split_zero_of_condition, 3, "emb"),
    "CogView4AdaLayerNormContinuous": AdaptiveClass(_split_continuous_linear, 2, "conditioning_embedding"),
    "GlmImageAdaLayerNormContinuous": AdaptiveClass(_split_continuous_linear, 2, "conditioning_embedding"),
    "LuminaRMSNormZero": AdaptiveClass(_split_zero_without_shift, 4, "emb", options="scale"),
    "Qwen2_5_OmniAdaLayerNormZero": AdaptiveClass(_split_zero_of_condition, 6, "emb"),
    "Qwen2_5_OmniAdaLayerNormZero_Final": AdaptiveClass(_split_final, 2, "emb"),
}


def find_adaptive_replacement(module: nn.Module) -> ForwardReplacement | None:
    """Make the new forward of an adaptive norm, after comparing the two on random samples.

    Return None for a module of another class.

    Raises:
        UnpatchableModuleError: the results differ, or the norm inside is not patched.
    """
    name = type(module).__name__
    adaptive = _CLASSES.get(name)
    if adaptive is None:
        return None
    check_not_replaced(module)
    norm: Any = module._modules.get("norm")
    if norm is not None:
        _check_norm(norm)
    kind = AdaptiveGroupNormForward if norm is None else AdaptiveNormForward
    forward = kind(module, get_input_name(module), adaptive)
    try:
        matches_forward = _matches_forward_on_samples(module, forward)
    # The forward may be that of another version of the class.
    except Exception as error:
        raise UnpatchableModuleError(f"a small one of its kind raised {type(error).__name__}") from error
    if not matches_forward:
        raise UnpatchableModuleError("a small one of its kind computes something else")
    operation = "group_norm" if norm is None else norm.forward.operation
    return ForwardReplacement(f"{operation} with {adaptive.options}, as {name} has it", forward)


def _matches_forward_on_samples(module: Any, forward: AdaptiveNormForward) -> bool:
    """Return whether a small copy of a module agrees with a new forward on random samples."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        # AdaLayerNorm projects one condition for all samples, unless chunk_dim is 1.
        shape = (2,) if getattr(module, "chunk_dim", 1) == 1 else ()
        condition = torch.randn(*shape, _CONDITION, device="cpu", dtype=torch.float32)
        x_shape = (2, 3, _COLS) if forward.x_dim == 3 else (2, _COLS, 3, 3)
        x = torch.randn(x_shape, device="cpu", dtype=torch.float32)
        small = _make_small_copy(module, forward.adaptive, condition)
        arguments = {} if small._modules.get("emb") else {forward.adaptive.condition: condition}
        want = type(small).forward(small, x, **arguments)
        got = forward.compute_adaptive(small, x, **arguments)
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True)
    return all(mine.shape == other.shape and torch.allclose(mine, other, 1e-4, 1e-4) for mine, other in pairs)


class _FixedEmbedding(nn.Module):
    """A stand-in for a module's embedding, whose result is the same for all arguments."""

    def __init__(self, condition: Tensor) -> None:
        super().__init__()
        self._condition = condition

    def forward(self, *_: object, **__: object) -> Tensor:
        return self._condition


def _make_small_copy(module: Any, adaptive: AdaptiveClass, condition: Tensor) -> Any:
    """Make a copy of an adaptive norm with few columns, a random projection and no hooks on the CPU."""
    children = {name: child and copy_without_hooks(child) for name, child in module._modules.items()}
    outputs = adaptive.part_count * _COLS
    children["linear"] = nn.Linear(_CONDITION, outputs, device="cpu", dtype=torch.float32)
    if children.get("emb") is not None:
        children["emb"] = _FixedEmbedding(condition)
    if "norm" in children:
        norm: Any = nn.LayerNorm(_COLS, elementwise_affine=False)
        norm.forward = LayerNormForward(norm, "input")
        children["norm"] = norm
    small = object.__new__(type(module))
    small.__dict__.update(module.__dict__, _modules=children)
    if "norm" not in children:
        small.num_groups = 2
    return small


def _check_norm(norm: Any) -> None:
    """Raise UnpatchableModuleError unless a norm is patched by a function that can modulate its result."""
    if not isinstance(norm.forward, PatchedForward):
        raise UnpatchableModuleError("its norm is not patched, or behind a hook of accelerate")
    if not norm.forward.can_modulate:
        raise UnpatchableModuleError(f"its {norm.forward.operation} has a bias or an activation of its own")


def _name_modulation(scale: Tensor, shift: Tensor | None) -> dict[str, Tensor]:
    return {"scale": scale} if shift is None else {"scale": scale, "shift": shift}


def _expand_to_tokens(part: Tensor) -> Tensor:
    """Return the view [N, 1, cols] of a part [N, cols]; parts of other ranks stay as they are."""
    return part[:, None] if part.dim() == 2 else part
