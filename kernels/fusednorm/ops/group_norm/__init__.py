"""GroupNorm: what both memory layouts share."""
