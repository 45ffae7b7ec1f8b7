"""Other servers of LayerNorm, each in its usual form, driven by the same load as normserve."""
