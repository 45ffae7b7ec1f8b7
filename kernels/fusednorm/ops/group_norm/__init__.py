"""GroupNorm: code for both memory layouts."""
