"""What a whole model sees: a training step and a forward pass with every norm a provider's."""
