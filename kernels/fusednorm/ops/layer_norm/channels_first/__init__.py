"""LayerNorm and RMSNorm over the channels of contiguous [N, C, *spatial], whose positions are adjacent."""
