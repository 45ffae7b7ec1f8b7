"""The activations as torch itself computes them, for tests of the library's formulas and kernels."""

import torch.nn.functional as F  # noqa: N812

TORCH_ACTIVATIONS = {
    "none": lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
