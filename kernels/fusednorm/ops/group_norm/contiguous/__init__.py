"""GroupNorm of contiguous samples."""
