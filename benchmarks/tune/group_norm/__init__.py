"""Timing of launch configurations of GroupNorm passes."""
