"""The bytes by which prepared calls are limited are no fewer than those that they take."""

import ctypes
import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc says what is allocated")
def test_estimates_are_upper_bounds():
    command = [sys.executable, "-m", "tests.service.requests.prepared_bytes"]
    # Else Python's own allocator, which does not say so, has the small objects.
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    taken = json.loads(told)
    assert len(taken) == 13
    for name, (measured, estimated) in taken.items():
        # Nor so many that little is kept.
        assert measured <= estimated < 6 * measured, name
