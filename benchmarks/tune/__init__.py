"""Launch configurations, timed: of LayerNorm passes and of GroupNorm passes."""
