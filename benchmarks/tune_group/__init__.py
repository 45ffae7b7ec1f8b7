"""Launch configurations of GroupNorm passes, timed; `tune` does so for LayerNorm."""
