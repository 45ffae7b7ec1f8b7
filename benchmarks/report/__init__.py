"""Documents whose figures are computed from `benchmarks/results/*.csv`, so that none can differ from its CSV."""
