"""Which backend serves where."""

import pytest
import torch
from normserve.backends.backend_choice import make_backend_by_name
from normserve.errors import ConfigurationError


def test_torch_by_name():
    assert make_backend_by_name("torch", 1).name == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_means_the_cpu_and_is_an_error_for_triton():
    assert make_backend_by_name("auto", 1).name == "torch"
    with pytest.raises(ConfigurationError, match="CUDA"):
        make_backend_by_name("triton", 1)
