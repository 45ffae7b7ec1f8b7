"""Norms as model libraries write them, and tiny models of them."""

import functools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class LlamaRMSNorm(nn.Module):
    """x_hat is rounded to x's dtype before it is multiplied; the result is what torch promotes to."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.float32)
        mean_square = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean_square + self.variance_epsilon)).to(dtype)


class T5LayerNorm(nn.Module):
    """An RMSNorm by another name; a low weight's dtype is the result's."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        mean_square = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(mean_square + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaRMSNorm(nn.Module):
    """The weight is kept around zero, and everything is float32 until the end."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class FunctionalRMSNorm(nn.Module):
    """By torch's function, which autocast knows."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.normalized_shape = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class UnscaledSquareNorm(nn.Module):
    """Looks like an RMSNorm, and is none: eps stands outside of the root."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class GatedRMSNorm(LlamaRMSNorm):
    """May be called with a gate."""

    def forward(self, hidden_states, gate=None):
        y = super().forward(hidden_states)
        return y if gate is None else y * F.silu(gate)


class MaskedRMSNorm(LlamaRMSNorm):
    """May be called with a mask."""

    def forward(self, hidden_states, mask=None):
        y = super().forward(hidden_states)
        return y if mask is None else y * mask


class NormalizeRMSNorm(nn.Module):
    """Divides by the Euclidean norm, or by 1e-12 if that is larger, over channels or the last axis."""

    def __init__(self, size, *unit_axes, bias=False):
        super().__init__()
        self.scale, self.axis = size**0.5, 1 if unit_axes else -1
        self.gamma = nn.Parameter(torch.ones(size, *unit_axes))
        self.bias = nn.Parameter(torch.zeros(size, *unit_axes)) if bias else 0.0

    def forward(self, x):
        return F.normalize(x.float(), dim=self.axis).to(x.dtype) * self.scale * self.gamma + self.bias


class MovedWeightRMSNorm(LlamaRMSNorm):
    """Moves its weight to the device of x, where the weight usually is."""

    def forward(self, x):
        y = F.rms_norm(x.float(), x.shape[-1:], None, self.variance_epsilon)
        return (y * self.weight.to(x.device)).to(device=x.device, dtype=x.dtype)


class SizedAxisRMSNorm(LlamaRMSNorm):
    """Over dim 1 of an x that has its width there, else over the last axis."""

    def forward(self, x):
        if x.shape[1] == len(self.weight):
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)
        return super().forward(x)


class OneSampleRMSNorm(LlamaRMSNorm):
    """Computes something else for one sample."""

    def forward(self, x):
        return super().forward(x) * (2 if len(x) == 1 else 1)


class StridedRMSNorm(LlamaRMSNorm):
    """Computes something else for an x that is not contiguous."""

    def forward(self, x):
        return super().forward(x) * (1 if x.is_contiguous() else 2)


class DetachedRMSNorm(LlamaRMSNorm):
    """Has no gradients of its statistics."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon).detach()


class ClampedRMSNorm(LlamaRMSNorm):
    """Limits its results in float16 alone."""

    def forward(self, x):
        y = super().forward(x)
        return y.clamp(-0.5, 0.5) if x.dtype is torch.float16 else y


class CohereLayerNorm(nn.Module):
    """A LayerNorm in float32 with a weight alone, which may have a row for each head."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        centred = wide - wide.mean(-1, keepdim=True)
        x_hat = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x_hat).to(hidden_states.dtype)


class BiasLayerNorm(nn.Module):
    """A LayerNorm that adds a bias alone."""

    def __init__(self, size):
        super().__init__()
        self.eps, self.bias = 1e-5, nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], None, None, self.eps) + self.bias


class SequenceLayerNorm(nn.LayerNorm):
    """Over the channels of [N, C, length] alone."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class DebertaLayerNorm(nn.Module):
    """A LayerNorm with all its parameters and not derived from torch's; x_hat is rounded."""

    def __init__(self, size, eps=1e-12):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        variance, mean = torch.var_mean(wide, -1, unbiased=False, keepdim=True)
        x_hat = (wide - mean) / torch.sqrt(variance + self.variance_epsilon)
        return self.weight * x_hat.to(hidden_states.dtype) + self.bias


class OlmoLayerNorm(nn.Module):
    """A LayerNorm without parameters, whose eps only the code has."""

    def __init__(self, size):
        super().__init__()
        self.normalized_shape = (size,)

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        return F.layer_norm(wide, self.normalized_shape, None, None, eps=1e-5).to(hidden_states.dtype)


class LayerNorm1P(nn.LayerNorm):
    """Nemotron's: one is added to the weight."""

    def forward(self, hidden_states):
        return F.layer_norm(hidden_states, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class FP32LayerNorm(nn.LayerNorm):
    """diffusers': everything is float32 until the end."""

    def forward(self, inputs):
        weight, bias = (None if each is None else each.float() for each in (self.weight, self.bias))
        return F.layer_norm(inputs.float(), self.normalized_shape, weight, bias, self.eps).to(inputs.dtype)


class UnweightedRMSNorm(nn.Module):
    """An RMSNorm without parameters and of any width."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).type_as(x)


class BiasedRMSNorm(LlamaRMSNorm):
    """diffusers' RMSNorm with a bias, which is float32 if a parameter is."""

    def __init__(self, size, eps=1e-6):
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states):
        return super().forward(hidden_states) + self.bias


class GroupNormAct(nn.GroupNorm):
    """timm's GroupNorm with an activation of its own."""

    def __init__(self, num_channels, num_groups=2, activation=None):
        super().__init__(num_groups, num_channels)
        self.drop, self.act = nn.Identity(), activation or nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)))


class LayerNormAct(nn.LayerNorm):
    """timm's LayerNorm with an activation of its own."""

    def __init__(self, size, activation=None):
        super().__init__(size)
        self.drop, self.act = nn.Identity(), activation or nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)))


class RmsNormAct(nn.RMSNorm):
    """timm's RMSNorm with an activation of its own."""

    def __init__(self, size, activation=None):
        super().__init__(size, eps=1e-6)
        self.drop, self.act = nn.Identity(), activation or nn.GELU()

    def forward(self, x):
        return self.act(self.drop(F.rms_norm(x, self.normalized_shape, self.weight, self.eps)))


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of [N, C, H, W]."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class InheritingLayerNorm(nn.LayerNorm):
    """A class of its own with torch's forward."""


def timm_layer_norm(forward=None):
    """timm's class, which is known by its name; with another forward, a later version of it."""

    def as_timm(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    body = {"__module__": "timm.layers.norm", "__qualname__": "LayerNorm", "forward": forward or as_timm}
    return type("LayerNorm", (nn.LayerNorm,), body)


def timm_group_norm():
    """The same; its constructor takes the groups second."""

    def constructed(self, num_channels, num_groups=32):
        nn.GroupNorm.__init__(self, num_groups, num_channels)

    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    body = {
        "__module__": "timm.layers.norm",
        "__qualname__": "GroupNorm",
        "__init__": constructed,
        "forward": forward,
    }
    return type("GroupNorm", (nn.GroupNorm,), body)


class ResnetBlock2D(nn.Module):
    """As diffusers names and uses its parts."""

    def __init__(self, channels=4, out=6, temb=5, embedding="default", activation=None, factor=1.5):
        super().__init__()
        self.time_embedding_norm, self.skip_time_act, self.output_scale_factor = embedding, False, factor
        self.norm1 = nn.GroupNorm(2, channels, eps=1e-6)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        width = 2 * out if embedding == "scale_shift" else out
        self.time_emb_proj = None if temb is None else nn.Linear(temb, width)
        self.norm2 = nn.GroupNorm(2, out, eps=1e-6)
        self.dropout = nn.Dropout(0.0)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nonlinearity = activation or nn.SiLU()
        self.upsample = self.downsample = None
        self.conv_shortcut = None if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, input_tensor, temb, *args, **kwargs):
        hidden = self.nonlinearity(self.norm1(input_tensor))
        if self.upsample is not None:
            input_tensor, hidden = self.upsample(input_tensor), self.upsample(hidden)
        elif self.downsample is not None:
            input_tensor, hidden = self.downsample(input_tensor), self.downsample(hidden)
        hidden = self.conv1(hidden)
        if self.time_emb_proj is not None:
            temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))[:, :, None, None]
        if self.time_embedding_norm == "scale_shift":
            scale, shift = torch.chunk(temb, 2, dim=1)
            hidden = self.norm2(hidden) * (1 + scale) + shift
        else:
            hidden = self.norm2(hidden if temb is None else hidden + temb)
        hidden = self.conv2(self.dropout(self.nonlinearity(hidden)))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return (input_tensor + hidden) / self.output_scale_factor


class Mixed(nn.Module):
    """x [N, 4, 8] through a norm of every kind, a shared one and one with tied parameters among them."""

    def __init__(self):
        super().__init__()
        self.first = nn.LayerNorm(8)
        self.llama = LlamaRMSNorm(8)
        self.gemma = GemmaRMSNorm(8)
        self.rms = nn.RMSNorm((4, 8))
        self.again = self.first
        self.tied = nn.LayerNorm(8)
        self.tied.weight = self.first.weight
        self.net = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Linear(8, 8), nn.GroupNorm(4, 4))
        varied(self)

    def forward(self, x):
        for layer in (self.first, self.llama, self.gemma, self.rms, self.again, self.tied, self.net):
            x = x + layer(x)
        return x


def add_hook(module, shift=0.0):
    """Replace a module's forward as accelerate's hooks do; this one adds a number to the input."""

    def hooked(*inputs):
        return module._old_forward(*(x + module._hf_hook for x in inputs))

    module._old_forward, module._hf_hook = module.forward, shift
    module.forward = functools.update_wrapper(functools.partial(hooked), module._old_forward)


def remove_hook(module):
    """As accelerate does, which leaves the bound method of the class in the instance."""
    module.forward = module._old_forward
    del module._old_forward, module._hf_hook


def varied(module):
    """A module with random parameters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module
