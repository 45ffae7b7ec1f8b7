"""Timing of launch configurations of LayerNorm passes."""
