"""GroupNorm of channels-last samples."""
