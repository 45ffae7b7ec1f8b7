"""The activations as torch itself computes them, for tests of the library's formulas and kernels."""

import torch.nn.functional as F  # noqa: N812

TORCH_ACTIVATIONS = {
    "none": lambda z: z,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


def activate_by_torch(z, options):
    """The activation of a call's options."""
    if "negative_slope" in options:
        return F.leaky_relu(z, options["negative_slope"])
    return TORCH_ACTIVATIONS[options.get("activation", "none")](z)
