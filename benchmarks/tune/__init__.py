"""Timing of launch configurations of LayerNorm passes and of GroupNorm passes."""
