"""Fusion of a norm and the activation after it, in modules whose own code applies one after the other.

The norm and the activation stay unchanged for all other callers: the forward of the surrounding module computes
both in one call.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fusednorm.api.patching.activation_modules import ActivationOptions, find_activation, has_hooks
from fusednorm.api.patching.norm_recognition import UnpatchableModuleError, check_not_replaced, get_input_name
from fusednorm.api.patching.patched_forward import ForwardReplacement, PatchedForward, is_supported_input
from fusednorm.errors import KernelInputError


class SequentialForward(PatchedForward):
    """Forward of a torch.nn.Sequential that computes a norm and the activation after it in one pass."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module: Any = self.module
        x = inputs[0] if len(inputs) == 1 and not named else self._get_only_input(inputs, named)
        if x is None:
            return type(module).forward(module, *inputs, **named)
        layers, place = list(module), 0
        while place < len(layers):
            layer, *following = layers[place : place + 2]
            y = compute_norm_and_activation(layer, following[0], x) if following else None
            x, layer_count = (layer(x), 1) if y is None else (y, 2)
            place += layer_count
        return x


class ResnetBlockForward(PatchedForward):
    """Forward of diffusers' ResnetBlock2D that computes each GroupNorm and its activation in one pass."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module: Any = self.module
        if not named and 1 <= len(inputs) <= 2:
            y = self.compute(module, *inputs)
            if y is not None:
                return y
        return type(module).forward(module, *inputs, **named)

    def compute(self, module: Any, x: Tensor, temb: Tensor | None = None) -> Any:
        """Compute the block's y for x [N, C, H, W] and temb [N, T]; None if a norm cannot be fused here.

        Return None, too, if temb is missing or unexpected.  The caller then runs the forward of the block's
        class.
        """
        if (temb is None) != (module.time_emb_proj is None):
            return None
        norm1, norm2, activation = module.norm1, module.norm2, module.nonlinearity
        hidden = compute_norm_and_activation(norm1, activation, x)
        # The second norm may be fused if the first is, unless there is a scale and shift that it does not support.
        if hidden is None or _find_fusible_activation(norm2, activation) is None:
            return None
        sample = module.downsample if module.upsample is None else module.upsample
        if sample is not None:
            x, hidden = sample(x), sample(hidden)
        hidden = module.conv1(hidden)
        scale = shift = None
        if temb is not None:
            temb = module.time_emb_proj(temb if module.skip_time_act else activation(temb))
            if module.time_embedding_norm == "scale_shift":
                scale, shift = temb.chunk(2, dim=1)
            else:
                hidden = hidden + temb[:, :, None, None]
        activated = compute_norm_and_activation(norm2, activation, hidden, scale, shift)
        if activated is None:
            z = norm2(hidden)
            if scale is not None and shift is not None:
                z = z * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
            activated = activation(z)
        hidden = module.conv2(module.dropout(activated))
        if module.conv_shortcut is not None:
            x = module.conv_shortcut(x)
        return (x + hidden) / module.output_scale_factor


def compute_norm_and_activation(
    norm: Any, activation: nn.Module, x: Any, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor | None:
    """Compute activation(norm(x) * (1 + scale) + shift) in one pass; None if the kernels do not support this.

    Return None, too, if `norm` is not a patched norm, if a module has hooks, which one pass would skip, or if a
    compiler traces the norm's own class.
    """
    options = _find_fusible_activation(norm, activation)
    if options is None or not is_supported_input(x):
        return None
    try:
        y: Tensor = norm.forward.compute(norm, x, scale=scale, shift=shift, **options._asdict())
    except KernelInputError:
        return None
    return y


def find_block_replacement(module: nn.Module) -> ForwardReplacement | None:
    """Make the new forward of a Sequential or a ResnetBlock2D; it fuses each norm with its activation.

    Return None for a module of another class, and for a Sequential without a patched norm before an activation.

    Raises:
        UnpatchableModuleError: the module is such a block, but must not be patched.
    """
    if type(module).forward is nn.Sequential.forward:
        return _find_sequential_replacement(module)
    if type(module).__name__ == "ResnetBlock2D" and hasattr(module, "norm1") and hasattr(module, "nonlinearity"):
        return _find_resnet_block_replacement(module)
    return None


def _find_sequential_replacement(module: Any) -> ForwardReplacement | None:
    """Make the replacement for a Sequential's forward; None if no activation follows a patched norm.

    Raises:
        UnpatchableModuleError: the forward has been replaced already.
    """
    layers = list(module)
    pairs = [
        f"{norm.forward.operation} with {options}"
        for norm, activation in pairwise(layers)
        if _is_fusible_norm(norm) and (options := find_activation(activation)) is not None
    ]
    if not pairs:
        return None
    check_not_replaced(module)
    described = ", ".join(pairs)
    return ForwardReplacement(f"{described} in a Sequential", SequentialForward(module, get_input_name(module)))


def _find_resnet_block_replacement(module: Any) -> ForwardReplacement:
    """Make the replacement for the forward of a ResnetBlock2D, after comparing the two on random samples.

    Raises:
        UnpatchableModuleError: the results differ, or the block does not have the expected norms and
            activation.
    """
    check_not_replaced(module)
    activation = find_activation(module.nonlinearity)
    if activation is None or not all(
        _is_fusible_norm(norm) and norm.forward.operation == "group_norm" for norm in (module.norm1, module.norm2)
    ):
        raise UnpatchableModuleError(
            "its norms and nonlinearity are not GroupNorms and an activation to be taken as one"
        )
    forward = ResnetBlockForward(module, get_input_name(module))
    try:
        matches_forward = _matches_forward_on_samples(module)
    # The forward may be that of another version of the class.
    except Exception as error:
        raise UnpatchableModuleError(f"a small one of its kind raised {type(error).__name__}") from error
    if not matches_forward:
        raise UnpatchableModuleError("a small one of its kind computes something else")
    return ForwardReplacement(f"twice group_norm with {activation} in a ResnetBlock2D", forward)


_SAMPLING = ("upsample", "downsample")


def _matches_forward_on_samples(module: Any) -> bool:
    """Return whether a copy with few channels agrees with `ResnetBlockForward` on random samples."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = _make_small_copy(module)
        x = torch.randn(2, 4, 3, 3, device="cpu", dtype=torch.float32)
        temb = None if module.time_emb_proj is None else torch.randn(2, 5, device="cpu", dtype=torch.float32)
        want = type(small).forward(small, x, temb)
        got = ResnetBlockForward(small, "").compute(small, x, temb)
    return got is not None and got.shape == want.shape and torch.allclose(got, want, 1e-4, 1e-4)


def _make_small_copy(module: Any) -> Any:
    """Make a copy of a ResnetBlock2D with few channels and random parameters on the CPU, its norms patched."""
    out = 4 if module.conv_shortcut is None else 6
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    layers: dict[str, nn.Module | None] = {
        "norm1": nn.GroupNorm(2, 4, module.norm1.eps, **on_cpu),
        "norm2": nn.GroupNorm(2, out, module.norm2.eps, **on_cpu),
        "conv1": nn.Conv2d(4, out, 3, padding=1, **on_cpu),
        "conv2": nn.Conv2d(out, out, 3, padding=1, **on_cpu),
        "dropout": nn.Dropout(0.0),
    }
    if module.conv_shortcut is not None:
        layers["conv_shortcut"] = nn.Conv2d(4, out, 1, **on_cpu)
    if module.time_emb_proj is not None:
        width = 2 * out if module.time_embedding_norm == "scale_shift" else out
        layers["time_emb_proj"] = nn.Linear(5, width, **on_cpu)
    # The block's own sampling expects its channels, and may be a function.
    sampling = {name: nn.Upsample(scale_factor=2) for name in _SAMPLING if getattr(module, name) is not None}
    for name in ("norm1", "norm2"):
        norm: Any = layers[name]
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.forward = type(module._modules[name].forward)(norm, "input")
    small = object.__new__(type(module))
    attributes = {name: value for name, value in module.__dict__.items() if name not in sampling}
    small.__dict__.update(attributes, _modules={**module._modules, **layers, **sampling})
    return small


def _find_fusible_activation(norm: Any, activation: nn.Module) -> ActivationOptions | None:
    """Return the options by which one call computes `norm` and `activation`; None if it must not, as for hooks."""
    if not isinstance(norm, nn.Module) or not _is_fusible_norm(norm):
        return None
    forward: Any = norm.forward
    if (is_compiling() and not forward.traces_operator) or has_hooks(norm) or has_hooks(activation):
        return None
    return find_activation(activation)


def _is_fusible_norm(norm: Any) -> bool:
    """Return whether a module has a replaced forward that can fuse the activation after the norm."""
    forward = norm.forward
    return isinstance(forward, PatchedForward) and forward.can_fuse_activation
