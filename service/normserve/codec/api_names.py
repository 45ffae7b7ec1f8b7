"""The names of activations in the API, for the server and its clients."""

from typing import Literal, get_args

ActivationName = Literal["none", "relu", "silu", "gelu", "gelu_tanh"]
"""The name of an activation; gelu is by erf, gelu_tanh by tanh."""

ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)
