"""The differentiable functions' formulas in plain torch, step by step, for derivatives of any order and mode.

Not torch's own norms: `torch.nn.functional.layer_norm` has no right derivative of its forward mode.
"""

from tests.kernels.harness.activations import TORCH_ACTIVATIONS


def normalised(h, axes, eps, centre=True):
    if centre:
        h = h - h.mean(axes, keepdim=True)
    return h * (h.square().mean(axes, keepdim=True) + eps).rsqrt()


def rows(name, x, w, b, r, activation="none"):
    h = x + r if name.startswith("add_") else x
    rms = "rms" in name
    z = normalised(h, -1, 1e-6 if rms else 1e-5, centre=not rms) * (w + 1 if "zero" in name else w)
    y = TORCH_ACTIVATIONS[activation](z if rms else z + b)
    return (y, h) if name.startswith("add_") else y


def samples(name, x, w, b, r, activation="none"):
    """Samples whose scale is w, and whose shift and gate are b."""
    scale, shift = w.unsqueeze(-2), b.unsqueeze(-2)
    h = r + shift * x
    rms = "rms" in name
    z = normalised(h, -1, 1e-6 if rms else 1e-5, centre=not rms)
    return TORCH_ACTIVATIONS[activation](z * (1 + scale) + shift), h


def groups(name, x, w, b, r, activation="none", scale=None, shift=None):
    h = x + r if name.startswith("add_") else x
    per_channel = (-1, *(1,) * (x.dim() - 2))
    z = normalised(h.reshape(x.shape[0], 2, -1), -1, 1e-5).reshape(x.shape)
    z = z * w.reshape(per_channel) + b.reshape(per_channel)
    if scale is not None:
        z = z * (1 + scale.reshape(*scale.shape, *per_channel[1:]))
    if shift is not None:
        z = z + shift.reshape(*shift.shape, *per_channel[1:])
    y = TORCH_ACTIVATIONS[activation](z)
    return (y, h) if name.startswith("add_") else y


def formula(name):
    """What `norm_calls.CALLS[name]` computes, with the same arguments."""

    def call(x, w, b, r, **options):
        compute = groups if "group" in name else samples if "samples" in name else rows
        return compute(name, x, w, b, r, **options)

    return call
