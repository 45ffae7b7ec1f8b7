import numpy as np
from normload.adapters.row_adapters import make_parameters

from benchmarks.peers.__main__ import SIZES, make_scenario


def test_every_size_asks_for_the_same_parameters():
    held = [make_parameters(make_scenario(nbytes, 1.0).workload.draw_cases(0)[0][0]) for nbytes in SIZES.values()]
    for name in ("weight", "bias"):
        assert all(np.array_equal(held[0][name], other[name]) for other in held)
