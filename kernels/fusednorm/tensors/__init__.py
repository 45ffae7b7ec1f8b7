"""Torch's tensors: their descriptions, devices, layouts and activations; `arguments` has those of any array."""
