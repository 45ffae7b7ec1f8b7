"""Leaves out the tests of `fusednorm.jax` where JAX is not installed, as in the environment of all other tests."""

from importlib import util

collect_ignore_glob = [] if util.find_spec("jax") else ["test_*.py"]
