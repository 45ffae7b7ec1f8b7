"""The CPU backend: jobs become calls of `fusednorm.cpu.batch_invariant`."""
