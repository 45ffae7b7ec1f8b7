"""Forward passes of LayerNorm and RMSNorm whose y is float8_e4m3fn."""
