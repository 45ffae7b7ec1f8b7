"""Whole models: a training step and a forward pass in which all norms are a provider's."""
