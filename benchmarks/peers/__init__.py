"""Other servers of LayerNorm, each as its makers would write it, to be driven by the same load as normserve."""
