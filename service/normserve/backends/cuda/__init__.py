"""CUDA through fusednorm: streams, graphs, and where tensors lie while a batch is computed."""
