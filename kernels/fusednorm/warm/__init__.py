"""Compilation before any launch, in parallel processes and without a GPU: `python -m fusednorm.warm`."""
