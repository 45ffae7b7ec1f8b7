"""Launch configurations of GroupNorm passes, timed."""
