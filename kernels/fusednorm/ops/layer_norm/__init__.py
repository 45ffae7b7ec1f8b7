"""LayerNorm and RMSNorm over rows."""
