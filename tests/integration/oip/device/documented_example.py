"""The documentation's example of CUDA shared memory, which every client of NVIDIA's runs as it stands."""

import re
from pathlib import Path

import numpy as np

ROWS = np.random.default_rng(7).standard_normal((64, 1024)).astype(np.float32)

_PAGE = Path(__file__).parents[4] / "docs/coming-from-triton.md"


def normalised(rows):
    wide = rows.astype(np.float64)
    return (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)


def check_example(triton, client, cuda):
    """Run the page's last program with a client and its module, and check the result that is in the region."""
    *_, code = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    known = {"hidden": ROWS, "client": client, "triton": triton}
    try:
        exec(code, known)
        both = cuda.get_contents_as_numpy(known["region"], np.float32, (2, *ROWS.shape))
        np.testing.assert_allclose(both[1], normalised(ROWS), atol=1e-5)
    finally:
        client.unregister_cuda_shared_memory()
        if "region" in known:
            cuda.destroy_shared_memory_region(known["region"])
