"""Compiling ahead of any launch, in parallel processes and with no GPU: `python -m fusednorm.warm`."""
