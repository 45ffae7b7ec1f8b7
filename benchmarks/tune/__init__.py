"""Launch configurations of LayerNorm passes, timed; `tune_group` does so for GroupNorm."""
