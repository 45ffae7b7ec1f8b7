"""Launch configurations of LayerNorm passes, timed."""
