"""The names of activations in the API, for the server and its clients."""

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")
