"""numpy as it is where nobody has imported ml_dtypes, which other tests of the process may have."""

from types import SimpleNamespace

import numpy as np
import pytest
from normserve.client.calls import array_conversion


@pytest.fixture
def plain_numpy(monkeypatch):
    def dtype(what):
        if what in ("bfloat16", "float8_e4m3fn"):
            raise TypeError(f"data type {what!r} not understood")
        return np.dtype(what)

    array_conversion.get_numpy_dtype.cache_clear()
    monkeypatch.setattr(array_conversion, "np", SimpleNamespace(**{**vars(np), "dtype": dtype}))
    yield
    array_conversion.get_numpy_dtype.cache_clear()
