"""CUDA with fusednorm: streams, graphs, and the memory of tensors while a batch is computed."""
