"""Load tests for normserve, and for servers of other makers that normalise tensors."""
